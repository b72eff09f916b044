"""What a session trains: models, their optimizers, and state that belongs to them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch

from p2pdpt.errors import SessionError
from p2pdpt.training.data import mix_seed
from p2pdpt.training.digest import module_digest, named_state, tensor_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["Subject"]

_UNSHAPED: Final = (
    torch.nn.parameter.UninitializedParameter,
    torch.nn.parameter.UninitializedBuffer,
)


class Subject:
    """Models and optimizers that fit each other and can be trained in a group.

    Attributes:
        models: at least one.
        optimizers: of their parameters only.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Check models and optimizers.

        Args:
            state: objects with ``state_dict()`` that must be equal at the start.

        Raises:
            SessionError: one of them cannot be trained in a group; says which, why, and what to
                do instead.
        """
        self.models = [model] if isinstance(model, torch.nn.Module) else list(model)
        if optimizer is None:
            self.optimizers: list[torch.optim.Optimizer] = []
        elif isinstance(optimizer, torch.optim.Optimizer):
            self.optimizers = [optimizer]
        else:
            self.optimizers = list(optimizer)
        self._state = dict(state or {})
        self._check_models()
        for each in self.optimizers:
            self._check_optimizer(each)
        for name, thing in self._state.items():
            if not callable(getattr(thing, "state_dict", None)):
                raise SessionError(
                    f"state[{name!r}] is a {type(thing).__name__} without state_dict"
                )

    def _check_models(self) -> None:
        if not self.models or not all(isinstance(each, torch.nn.Module) for each in self.models):
            raise SessionError("p2pdpt.session(model) takes a torch.nn.Module, or a list of them")
        for index, model in enumerate(self.models):
            for kind, named in (
                ("parameter", model.named_parameters()),
                ("buffer", model.named_buffers()),
            ):
                for name, tensor in self._numbered(index, named):
                    if reason := _obstacle(tensor):
                        raise SessionError(f"{kind} {name} {reason}")

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SessionError(f"{kind} is no torch.optim.Optimizer")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise SessionError(_closure_text(kind))
        known = {id(parameter) for _, parameter in self.parameters()}
        strange = sum(
            id(parameter) not in known
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        if strange:
            raise SessionError(
                f"{kind} has {strange} parameters of no model of this session, which would "
                "stay different on each node; give all models: session([model, head], ...)"
            )

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and parameters of all models, tied ones once."""
        seen: set[int] = set()
        for index, model in enumerate(self.models):
            for name, parameter in self._numbered(index, model.named_parameters()):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all parameters, then all buffers, each once."""
        for _, parameter in self.parameters():
            yield parameter
        seen: set[int] = set()
        for model in self.models:
            for buffer in model.buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield buffer

    def digest(self) -> str:
        """Return the SHA-256 over all parameters and buffers, as hex."""
        return module_digest(self.models)

    def digests(self) -> dict[str, str]:
        """Return short digests of each parameter and buffer, by name."""
        named = named_state(self.models)
        return {name: tensor_digest([(name, tensor)])[:16] for name, tensor in named}

    def _numbered(
        self, index: int, named: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        prefix = f"{index}." if len(self.models) > 1 else ""
        for name, tensor in named:
            yield prefix + name, tensor

    def state(self) -> dict[str, Any]:
        """Return what has a ``state_dict``, by the name that a person would know it by."""
        named: dict[str, Any] = {
            f"optimizer {index} ({type(each).__name__})": each
            for index, each in enumerate(self.optimizers)
        }
        named.update((f"state[{name!r}]", each) for name, each in self._state.items())
        return named

    def settings(self) -> dict[str, str]:
        """Return what members must have in common besides parameters and buffers."""
        names = {id(parameter): name for name, parameter in self.parameters()}
        settings = {
            "models": str(len(self.models)),
            "optimizers": str(len(self.optimizers)),
        }
        for index, optimizer in enumerate(self.optimizers):
            groups = [[names[id(each)] for each in g["params"]] for g in optimizer.param_groups]
            sizes = "+".join(str(len(group)) for group in groups)
            # The order of parameters within an optimizer shows in its state only.
            order = mix_seed(*("/".join(group) for group in groups)) % 2**24
            settings[f"optimizer {index}"] = (
                f"{type(optimizer).__name__} of {sizes} parameters ({order:06x})"
            )
        return settings

    @contextlib.contextmanager
    def hooked(self, stepped: Callable[[], object]) -> Iterator[None]:
        """Call `stepped` after every optimizer step inside the block, and refuse closures."""

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            # What hooks are given begins with the optimizer itself.
            given = [each for each in args if each is not optimizer]
            if any(each is not None for each in given) or kwargs.get("closure") is not None:
                raise SessionError(_closure_text(type(optimizer).__name__))

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            stepped()

        with contextlib.ExitStack() as hooks:
            for each in self.optimizers:
                hooks.callback(each.register_step_pre_hook(before).remove)
                hooks.callback(each.register_step_post_hook(after).remove)
            yield


def _obstacle(tensor: torch.Tensor) -> str:
    """Return why a parameter or buffer cannot be kept equal on all nodes, and what to do."""
    if isinstance(tensor, _UNSHAPED):
        return "has no shape yet; run one batch through the model before p2pdpt.session(...)"
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return f"has the layout {layout}; only dense ones can be sent: use to_dense()"
    if tensor.device.type == "meta":
        return (
            "has no memory, for it is on the device meta; use model.to_empty(device='cpu') and "
            "give it values before p2pdpt.session(...)"
        )
    if tensor.device.type != "cpu":
        return (
            f"is on {tensor.device}; only models in main memory can be trained so far: use "
            "model.to('cpu')"
        )
    if tensor.is_quantized:
        return "is quantized; only plain numbers can be sent: use dequantize()"
    if torch._debug_has_internal_overlap(tensor) == 1:
        return "has several elements in one place of memory (expand); use clone()"
    return ""


def _closure_text(kind: str) -> str:
    return (
        f"{kind}.step(closure) runs backward an unknown number of times and cannot be trained in "
        "a group; call backward() yourself and then step() without a closure"
    )
