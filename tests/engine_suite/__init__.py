"""What every sampling engine has to do: one suite, run over each of them.

A test module of an engine defines the fixture `engine_factory` (scope "module": a function that makes an engine which
serves the model in a folder, see `rig.EngineFactory`) and imports everything from `tests.engine_suite.suite`. All tests
share one engine. What the engine answers is compared with plain transformers and PEFT.

The modules import torch, transformers, peft, tokenizers, numpy and pytest, and of ours what engines import anyway.
"""

import pytest

pytest.register_assert_rewrite(
    *(f"{__name__}.{module}" for module in ("rig", "distribution", "agreement", "draws", "ends", "prompts", "trouble"))
)
