# SPDX-License-Identifier: Apache-2.0
"""The weight loader: a hit maps what the vault holds, a miss loads from disk and publishes.

One process start loads once: where the vault has no such weights they are read from disk in the
same process, moved into segments and published, so that the next start finds them. Tensors are
taken as loaded, before vLLM's post-processing, which runs on a hit as it does on a miss; so a hit
does not depend on what post-processing keeps outside of the model's tensors.
"""

import gc
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from warmhold_wcache.client import VaultClient
from warmhold_wcache.content import Content, read_versions
from warmhold_wcache.errors import MissError, WcacheError
from warmhold_wcache.generation import Generation
from warmhold_wcache.vllm_plugin import model_state, residency
from warmhold_wcache.vllm_plugin.build import build_on
from warmhold_wcache.vllm_plugin.cpu_linear import (
    CpuLinear,
    forget_heads,
    guard_loading,
    prepare_shared,
    select_cpu_linear,
)
from warmhold_wcache.vllm_plugin.memory import Memory
from warmhold_wcache.vllm_plugin.model_state import StructureError
from warmhold_wcache.vllm_plugin.options import Options, Source, read_options
from warmhold_wcache.vllm_plugin.outcome import Outcome, write_outcome
from warmhold_wcache.vllm_plugin.publish import publish
from warmhold_wcache.vllm_plugin.support import find_unsupported
from warmhold_wcache.vllm_plugin.wanted import Wanted, find_wanted, read_external_bytes
from warmhold_wcache.vllm_plugin.worker_methods import add_worker_methods

logger = init_logger("vllm.warmhold")  # below vLLM's own, or its handlers would not see it

_RETRY_S = 0.2


class WarmholdLoader(BaseModelLoader):  # type: ignore[misc]
    """Load format `warmhold`, and `ipc_cache` on a CPU; `--model-loader-extra-config` has its
    settings."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        extra = load_config.model_loader_extra_config or {}
        self.options: Options = read_options(extra, load_config.load_format)
        self.waits = load_config.load_format == "ipc_cache" and not self.options.fallback
        self.disk = get_model_loader(
            replace(
                load_config,
                load_format=self.options.disk_format,
                model_loader_extra_config=dict(self.options.rest),
            )
        )

    def download_model(self, model_config: Any) -> None:
        """Fetch the checkpoint to this machine, as the loader for disks does."""
        self.disk.download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Load weights from disk into a model that exists; its shared tensors become private
        first."""
        residency.detach()
        self.disk.load_weights(model, model_config)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Any:
        """The checkpoint's tensors from disk: vLLM reloads weights in place with them."""
        return self.disk.get_all_weights(model_config, model)

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Bytes of device memory that another process holds for this model: none on a CPU."""
        return read_external_bytes(vllm_config, self._device(vllm_config), self.options, self.disk)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """Given the configuration, return the model with its weights, from the vault or from
        disk."""
        outcome = Outcome(
            publishes=self.options.publish,
            cpu_linear=self.options.cpu_linear if current_platform.is_cpu() else "",
        )
        if current_platform.is_cpu():
            # Before any layer is processed, and for every source: one path for all.
            select_cpu_linear(CpuLinear(self.options.cpu_linear))
        add_worker_methods()
        model = self._load(vllm_config, model_config, prefix, outcome)
        if outcome.cpu_linear == CpuLinear.SHARED:
            guard_loading(model)
            residency.BEFORE_WRITING.append(partial(forget_heads, model))
        outcome.seconds["total"] = time.monotonic() - outcome.started
        log = logger.warning if outcome.warn else logger.info
        log("weights %s", outcome.text())
        write_outcome(outcome, self.options.report)
        return model

    def _load(
        self, vllm_config: Any, model_config: Any, prefix: str, outcome: Outcome
    ) -> nn.Module:
        device = self._device(vllm_config)
        wanted = find_wanted(vllm_config, model_config, device, self.options, self.disk, outcome)
        if wanted is not None and self.options.source is not Source.DISK:
            model = self._try_vault(vllm_config, model_config, prefix, wanted, outcome)
            if model is not None:
                return model
        if self.options.source is Source.IPC_CACHE or self.waits:
            raise WcacheError(
                outcome.code or "wcache.absent",
                f"the weights are not in the vault: {outcome.reason}",
                "start once with mode auto, or preload the model",
            )
        return self._load_from_disk(vllm_config, model_config, prefix, wanted, outcome)

    def _try_vault(
        self,
        vllm_config: Any,
        model_config: Any,
        prefix: str,
        wanted: Wanted,
        outcome: Outcome,
    ) -> nn.Module | None:
        """The model on the vault's weights; None, with the reason in the outcome, on a miss."""
        try:
            with outcome.phase("fetch"), self._client() as client:
                generation, fds = self._fetch(client, wanted.key)
        except MissError as error:
            outcome.miss(error.code, error.detail, error.fields)
            return None
        except (WcacheError, OSError) as error:
            outcome.miss(getattr(error, "code", "wcache.absent"), str(error), warn=True)
            return None
        memory = wanted.memory
        try:
            with outcome.phase("map"):
                addresses = residency.map_generation(memory, generation, fds)
        except (WcacheError, OSError) as error:
            self._release(generation)
            outcome.miss("wcache.refused", f"the weights cannot be mapped: {error}", warn=True)
            return None
        finally:
            residency.close_all(fds)
        try:
            with outcome.phase("build"):
                model = build_on(
                    memory,
                    generation,
                    addresses,
                    vllm_config,
                    model_config,
                    prefix,
                    device=self._device(vllm_config),
                    copy=self.options.copy,
                )
        except Exception as error:
            residency.unmap(memory, generation, addresses)
            self._release(generation)
            known = isinstance(error, StructureError)
            outcome.miss("wcache.unsupported", str(error) or repr(error), warn=True)
            outcome.publishes = False
            outcome.not_published("the same key would bring the same failure")
            if not known:
                logger.exception("the vault's weights could not be used")
            return None
        outcome.hit(generation)
        if self.options.copy:
            residency.unmap(memory, generation, addresses)
            self._release(generation, drop=self.options.release)
        else:
            self._keep(memory, generation, addresses, model)
        return model

    def _fetch(self, client: VaultClient, key: dict[str, str]) -> tuple[Generation, list[int]]:
        deadline = time.monotonic() + self.options.state_timeout_s
        while True:
            try:
                return client.fetch(key)
            except (WcacheError, OSError) as error:
                mismatch = isinstance(error, MissError) and error.code == "wcache.key-mismatch"
                if not self.waits or mismatch or time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_S)

    def _client(self) -> VaultClient:
        return VaultClient(self.options.socket_path, self.options.connect_timeout_s)

    def _keep(
        self, memory: Memory, generation: Generation, addresses: list[int], model: nn.Module
    ) -> None:
        kept = residency.Residency(
            *(memory, generation, addresses),
            *(self.options.socket_path, self.options.connect_timeout_s),
        )
        residency.keep(kept, model)

    def _release(self, generation: Generation, drop: bool = False) -> None:
        with suppress(WcacheError, OSError), self._client() as client:
            client.release(generation.id)
            if drop:
                client.drop(generation.id)

    def _load_from_disk(
        self,
        vllm_config: Any,
        model_config: Any,
        prefix: str,
        wanted: Wanted | None,
        outcome: Outcome,
    ) -> nn.Module:
        if wanted is None:
            with outcome.phase("load"):
                model: nn.Module = self.disk.load_model(
                    vllm_config=vllm_config, model_config=model_config, prefix=prefix
                )
            outcome.size_bytes = _model_bytes(model)
            return model
        device = self._device(vllm_config)
        # vLLM's pool for sleep mode is not for weights that are going to move.
        sleeps = getattr(vllm_config.model_config, "enable_cumem_allocator", False)
        moves = outcome.publishes and sleeps
        with set_default_torch_dtype(model_config.dtype):
            with wanted.memory.loading() if moves else nullcontext():
                with outcome.phase("load"):
                    with device:
                        model = self.disk.create_model(
                            vllm_config=vllm_config, model_config=model_config, prefix=prefix
                        )
                    shapes = model_state.read_shapes(model)
                    scalars = model_state.read_scalars(model)
                    self.disk.load_weights(model, model_config)
                    gc.collect()
                outcome.size_bytes = _model_bytes(model)
                reason = find_unsupported(model)
                if not reason and model_state.read_shapes(model) != shapes:
                    reason = "loading changes the shapes of tensors"
                if not reason and read_versions(wanted.folder) != wanted.content.versions:
                    reason = "weight files changed while they were loaded"
                if reason:
                    outcome.not_published(reason)
                elif not outcome.publishes:
                    outcome.not_published(outcome.unpublished or "not asked for")
                else:
                    self._publish(model, model_config, wanted, scalars, outcome)
            if moves and "move" not in outcome.seconds:
                residency.move_to_pool(wanted.memory, model_state.read_inventory(model))
            with device:
                process_weights_after_loading(model, model_config, device)
            gc.collect()
        return model.eval()

    def _publish(
        self,
        model: nn.Module,
        model_config: Any,
        wanted: Wanted,
        scalars: dict[str, dict[str, Any]],
        outcome: Outcome,
    ) -> None:
        """Publish a loaded model, given the plain values that it had before."""
        changed = model_state.find_changed(scalars, model_state.read_scalars(model))
        if outcome.cpu_linear == CpuLinear.SHARED:
            with outcome.phase("pack"):
                prepare_shared(model)
        options = self._with_content(wanted.content)
        publish(model, model_config, wanted, changed, options, outcome)

    def _with_content(self, content: Content) -> Options:
        """The settings with the content in the launch key: before a first load nobody knows it."""
        if "content" not in self.options.launch_key:
            return self.options
        launch_key = {**self.options.launch_key, "content": content.digest}
        return replace(self.options, launch_key=launch_key)

    def _device(self, vllm_config: Any) -> torch.device:
        return torch.device(self.load_config.device or vllm_config.device_config.device)


def _model_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
