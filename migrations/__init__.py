"""The database's history, as alembic revisions; installed with the program (`tinworks migrate`)."""
