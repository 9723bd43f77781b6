# SPDX-License-Identifier: Apache-2.0
"""The part of warmhold that runs inside vLLM: a weight loader, a sleep mode and a control socket.
Alone here torch and vLLM are imported.

`register` is an entry point of `vllm.general_plugins`, so vLLM calls it in every process, also for
users who never ask for any of it: it adds names to tables and changes nothing else. What replaces
vLLM's own code is put in place by the loader, when it is asked to load.
"""

from contextlib import suppress


def register() -> None:
    """Add the load format `warmhold`; on a CPU, where upstream's cannot work, also `ipc_cache`; on
    an NVIDIA GPU the sleep mode `warmhold`.

    Called more than once per process without harm, as vLLM's plug-ins must be.
    """
    from vllm.model_executor import model_loader
    from vllm.platforms import current_platform

    from warmhold_wcache.vllm_plugin.loader import WarmholdLoader

    # The table itself: register_model_loader warns where a name is taken, which is meant here.
    table = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    if table.get("warmhold") is not WarmholdLoader:
        model_loader.register_model_loader("warmhold")(WarmholdLoader)
    if current_platform.is_cpu():
        table["ipc_cache"] = WarmholdLoader
    if current_platform.is_cuda():
        with suppress(ImportError):  # before vLLM 0.33 there is one sleep mode
            from warmhold_wcache.vllm_plugin.sleep_backend import register_sleep_backend

            register_sleep_backend()
