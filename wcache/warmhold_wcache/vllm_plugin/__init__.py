# SPDX-License-Identifier: Apache-2.0
"""The part of warmhold that runs inside vLLM: a weight loader and a control socket. Alone here
torch and vLLM are imported.

`register` is an entry point of `vllm.general_plugins`, so vLLM calls it in every process, also for
users who never ask for this loader: it adds a name to a table and changes nothing else. What
replaces vLLM's own code is put in place by the loader, when it is asked to load.
"""


def register() -> None:
    """Add the load format `warmhold`, and on a CPU, where upstream's cannot work, `ipc_cache`.

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
