"""Backup and restore of a whole installation, whatever database and blob store it has."""
