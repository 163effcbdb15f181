"""All tests of the suite, and their fixtures: `from tests.engine_suite.suite import *`."""

from tests.engine_suite.agreement import *  # noqa: F403
from tests.engine_suite.draws import *  # noqa: F403
from tests.engine_suite.ends import *  # noqa: F403
from tests.engine_suite.prompts import *  # noqa: F403
from tests.engine_suite.rig import at_rest, rig  # noqa: F401
from tests.engine_suite.trouble import *  # noqa: F403
