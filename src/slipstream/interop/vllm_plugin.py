"""vLLM's entry point `vllm.general_plugins`: what `pip install slipstream` adds to vLLM beside it."""

FASTEAGLE = "SlipstreamFastEagle3"  # vLLM leaves the names of draft models alone that end in "Eagle3"


def register() -> None:
    """Make FastEagle known to vLLM, which calls this in each of its processes."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(FASTEAGLE, "slipstream.interop.vllm_fasteagle:VLLMFastEagle")
