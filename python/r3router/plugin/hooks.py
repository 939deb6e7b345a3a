"""The hooks: which functions of which SGLang, and what happens around them.

| around | from | why |
|---|---|---|
| the scheduler's `…collect_routed_experts` | 0.5.11 | the payload is replaced by its descriptor |
| `BaseTopkCapturer.get_topk` | 0.5.12 | during that call: which slots, instead of a gather on the scheduler's thread |
| `TopkCaptureOutput.finalize`, `BaseTopkCapturer.on_forward_end` | 0.5.12 | slots that are still to be read are not overwritten |
| prefill's in-flight queue and `release_kv_cache` | 0.5.11 to 0.5.17 | these prefill engines do not collect R3: the plug-in does |
| `Scheduler.__init__` | 0.5.11 | the agent runs before the first request |

A hook that cannot be set or fails leaves the engine's own behaviour.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import re
import sys
from collections.abc import Callable
from typing import Any, Final

from .runtime import ArenaFull, Gathered, Runtime, dtype_of
from .settings import Settings

logger = logging.getLogger("r3router.plugin")
FIRST: Final = (0, 5, 11)
LAST: Final = (0, 5, 23)
"""Releases of SGLang that this version was read against."""

COLLECT: Final = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_routed_experts",
    "sglang.srt.managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin.maybe_collect_routed_experts",
)
COLLECT_INDEXER: Final = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_indexer_topk",
    "sglang.srt.managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin.maybe_collect_indexer_topk",
)
GET_TOPK: Final = "sglang.srt.state_capturer.base.BaseTopkCapturer.get_topk"
FORWARD_END: Final = "sglang.srt.state_capturer.base.BaseTopkCapturer.on_forward_end"
FINALIZE: Final = "sglang.srt.state_capturer.base.TopkCaptureOutput.finalize"
IN_FLIGHT: Final = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue"
RELEASE: Final = "sglang.srt.mem_cache.common.release_kv_cache"
SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler.__init__"


class State:
    """What the hooks share. The scheduler's loop is one thread, so there is one current call."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runtime: Runtime | None = None
        self.broken = False
        self.capture: list[Gathered] | None = None
        """Set while a collect method runs whose gather we take over."""
        self.prefill: Any = None
        """The scheduler whose finished transfers are being looked at, where we collect for it."""

    def ready(self, owner: Any) -> Runtime | None:
        """The runtime, made when it is first needed; `None` when it cannot be had."""
        if self.runtime is None and not self.broken:
            try:
                self.runtime = Runtime(self.settings, _rank(owner))
            except Exception:
                self.broken = True
                logger.exception("the plug-in cannot start: R3 rows go in-line")
        return self.runtime


def version() -> tuple[int, int, int] | None:
    """The release of SGLang that is imported; `None` when it cannot be told."""
    try:
        text = str(importlib.import_module("sglang.version").__version__)
    except Exception:
        return None
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def register() -> None:
    """Entry point: called by SGLang in each of its processes. Never raises."""
    try:
        _register()
    except Exception:
        logger.exception("the plug-in is off: R3 rows go in-line")


def _register() -> None:
    settings = Settings.read()
    if not settings.enabled:
        logger.warning("the plug-in is off (R3ROUTER_PLUGIN=0): R3 rows go in-line")
        return
    if _called_from("run_detokenizer_process", "run_data_parallel_controller_process"):
        return
    release = version()
    if (release is None or not FIRST <= release <= LAST) and not settings.force:
        logger.error(
            "the plug-in does not know SGLang %s (it knows %s to %s): R3 rows go in-line; R3ROUTER_PLUGIN_FORCE=1 tries it",
            release,
            ".".join(map(str, FIRST)),
            ".".join(map(str, LAST)),
        )
        return
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")

    def around(target: str, hook: Callable[..., Any]) -> bool:
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError):
            return False
        registry.HookRegistry.register(target, hook, registry.HookType.AROUND)
        return True

    hooks = Hooks(State(settings))
    if sum(around(target, hooks.collect) for target in COLLECT) == 0:
        logger.error("SGLang %s has none of %s: R3 rows go in-line", release, ", ".join(COLLECT))
        return
    if settings.indexer:
        for target in COLLECT_INDEXER:
            around(target, hooks.collect_indexer)
    if around(FINALIZE, hooks.finalize) and around(FORWARD_END, hooks.forward_end):
        around(GET_TOPK, hooks.get_topk)
    if not _prefill_collects() and around(IN_FLIGHT, hooks.in_flight):
        around(RELEASE, hooks.release)
    around(SCHEDULER, hooks.scheduler)


class Hooks:
    """The functions around SGLang's."""

    def __init__(self, state: State) -> None:
        self.state = state

    def collect(self, original: Callable[..., Any], owner: Any, request: Any) -> Any:
        """Around the collection of a finished request's routed experts."""
        if not getattr(request, "return_routed_experts", False):
            return original(owner, request)
        return self._collect(original, owner, request, "routed_experts")

    def collect_indexer(self, original: Callable[..., Any], owner: Any, request: Any) -> Any:
        """Around the collection of a finished request's indexer top-k."""
        if not getattr(request, "return_indexer_topk", False):
            return original(owner, request)
        return self._collect(original, owner, request, "indexer_topk")

    def _collect(self, original: Callable[..., Any], owner: Any, request: Any, field: str) -> Any:
        streams = _streams(owner)
        if streams is False:
            # Other ranks of a tensor-parallel group would gather what nobody sends.
            return None
        runtime = self.state.ready(owner)
        if runtime is None:
            return original(owner, request)
        why = "it cannot be told whether this rank streams" if streams is None else runtime.refusal(request)
        if why is not None:
            runtime.tell(why, request)
            return original(owner, request)
        capture: list[Gathered] | None = [] if _guarded() else None
        self.state.capture = capture
        try:
            result = original(owner, request)
        finally:
            self.state.capture = None
        taken = bool(capture)
        try:
            gathered = capture[0] if capture else _tensor(getattr(request, field, None), request, field)
            if gathered is None or gathered.shape[0] == 0:
                # Nothing, or no rows, which is an empty string to every client.
                return original(owner, request) if taken else result
            dtype = "int32" if field != "routed_experts" else dtype_of(getattr(owner, "model_config", None))
            raw = runtime.publish(gathered, dtype, str(getattr(request, "rid", "")), _weight_version(owner))
            torch = importlib.import_module("torch")
            setattr(request, field, torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        except ArenaFull as error:
            runtime.tell(f"the arena is full ({error})", request)
        except Exception as error:
            logger.exception("R3 rows of %s cannot be handed over", getattr(request, "rid", "?"))
            runtime.tell(f"the hook failed ({type(error).__name__})", request)
        else:
            return result
        # The placeholder, if there is one, must not leave the engine.
        return original(owner, request) if taken else result

    def get_topk(self, original: Callable[..., Any], capturer: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the gather: remembers the slots, and gives back a tensor with as many rows and no columns."""
        capture = self.state.capture
        if capture is None or capture:
            return original(capturer, *args, **kwargs)
        try:
            bound = inspect.signature(original).bind(capturer, *args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            end = int(given["seqlen"]) - 1
            start = min(int(given.get("start_len") or 0), end)
            slots = given["req_to_token_pool"].req_to_token[given["req_pool_idx"]][start:end].cpu().numpy().astype("int64")
            gathered = Gathered(capturer.host_cache.buffer.numpy(), slots, start)
            torch = importlib.import_module("torch")
            placeholder = torch.empty((len(slots), 0), dtype=torch.int32)
        except Exception:
            logger.exception("the slots of R3 rows cannot be told; the engine gathers them itself")
            return original(capturer, *args, **kwargs)
        capture.append(gathered)
        return placeholder

    def finalize(self, original: Callable[..., Any], output: Any) -> Any:
        """Before rows of a step are scattered into the host buffer (overlapped schedule)."""
        self._guard(output.host_cache, output.out_cache_loc)
        return original(output)

    def forward_end(self, original: Callable[..., Any], capturer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Before rows of a step are scattered into the host buffer (schedule without overlap)."""
        later = kwargs.get("no_copy_to_cpu", args[2] if len(args) > 2 else False)
        if not later:
            slots = getattr(forward_batch, "out_cache_loc_virtual", None)
            self._guard(capturer.host_cache, forward_batch.out_cache_loc if slots is None else slots)
        return original(capturer, forward_batch, *args, **kwargs)

    def _guard(self, host_cache: Any, slots: Any) -> None:
        runtime = self.state.runtime
        if runtime is None or runtime.writer.in_flight == 0:
            return
        try:
            runtime.writer.guard(host_cache.buffer.numpy(), slots.cpu().numpy())
        except Exception:
            logger.exception("it cannot be told which slots are overwritten; unwritten R3 rows will not pass")
            runtime.writer.give_up()

    def in_flight(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the look at prefill's transfers, of engines that do not collect R3 there."""
        self.state.prefill = scheduler
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            self.state.prefill = None

    def release(self, original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        """Before a transferred request's slots are freed: its rows are collected."""
        scheduler = self.state.prefill
        if scheduler is not None and getattr(request, "return_routed_experts", False) and request.routed_experts is None:
            try:
                collector = getattr(scheduler, "batch_result_processor", scheduler)
                name = "_maybe_collect_routed_experts"
                getattr(collector, name, None) or (name := "maybe_collect_routed_experts")
                getattr(collector, name)(request)
            except Exception:
                logger.exception("R3 rows of %s cannot be collected on prefill", getattr(request, "rid", "?"))
        return original(request, *args, **kwargs)

    def scheduler(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """After a scheduler is made: the agent is started where rows will be sent."""
        result = original(scheduler, *args, **kwargs)
        try:
            given = getattr(scheduler, "server_args", None) or (args[0] if args else kwargs.get("server_args"))
            if getattr(given, "enable_return_routed_experts", False) and _streams(scheduler):
                self.state.ready(scheduler)
        except Exception:
            logger.exception("the plug-in starts with the first request instead")
        return result


def _tensor(payload: Any, request: Any, field: str) -> Gathered | None:
    """Rows that the engine has gathered itself."""
    if payload is None or getattr(payload, "ndim", 0) != 3:
        return None
    start = int(getattr(request, "routed_experts_start_len", 0) or 0) if field == "routed_experts" else 0
    return Gathered(payload.numpy(), None, start)


def _streams(owner: Any) -> bool | None:
    """Whether this rank sends outputs; `None` when it cannot be told."""
    for holder in (getattr(owner, "output_streamer", None), getattr(owner, "ipc_channels", None), owner):
        sender = getattr(holder, "send_to_detokenizer", None)
        if sender is not None and hasattr(sender, "socket"):
            return sender.socket is not None
    return None


def _rank(owner: Any) -> int:
    """The data-parallel rank, for the agent's port."""
    try:
        rank = importlib.import_module("sglang.srt.runtime_context").get_parallel().dp_rank
    except Exception:
        rank = getattr(owner, "dp_rank", None)
    return int(rank or 0)


def _weight_version(owner: Any) -> str:
    return str(getattr(getattr(owner, "server_args", None), "weight_version", None) or "")


def _guarded() -> bool:
    """Whether the hooks that keep slots from being overwritten are in place."""
    try:
        return all(hasattr(pkgutil.resolve_name(target), "__wrapped__") for target in (FINALIZE, FORWARD_END, GET_TOPK))
    except (ImportError, AttributeError):
        return False


def _prefill_collects() -> bool:
    """Whether this SGLang's prefill engines collect R3 (0.5.18 on)."""
    try:
        module = importlib.import_module("sglang.srt.disaggregation.prefill")
        return "collect_routed_experts" in inspect.getsource(module)
    except (ImportError, OSError):
        return True


def _called_from(*names: str) -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in names:
            return True
    return False
