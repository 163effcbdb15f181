"""Tests that need vLLM. `make test-vllm` runs them, in an environment of its own."""
