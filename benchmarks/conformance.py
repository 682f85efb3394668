"""Check published implementations of the rules with `depthmix.testing.check_rule`: `python -m benchmarks.conformance`.

Each implementation is driven through a function that hands it the check's parameters and sublayers. Packages that are not installed
are skipped, and a line says so (`pip install '.[bench]'`). On a GPU the operators run there, elsewhere in Triton's interpreter where
they can.

--only TEXT checks what contains the text. --out names the file of the table.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthmix import create_mixer
from depthmix.testing import RuleReport, check_rule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N_BLOCKS, STREAMS = 3, 4
Call = Callable[[dict[str, Tensor], Tensor, Callable[..., Tensor]], Tensor]


class Subject(NamedTuple):
    """An implementation and what it is compared with."""

    package: str  # as on PyPI
    what: str
    rule: str
    build: Callable[[], Call]  # imports the package
    convention: str | None = None
    options: dict[str, Any] = {}


def mixer(rule: str, **options: Any) -> Call:
    """Run a mixer of this package."""

    def call(parameters: dict[str, Tensor], e: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        own = create_mixer(rule, dim=e.shape[-1], n_blocks=N_BLOCKS, **options).to(e.device)

        def whole(_: Any, x: Tensor) -> Tensor:
            state = own.start(x)
            for site in range(own.n_sites):
                read = own.read(state, site)
                state = own.write(state, site, sublayer(*(read if isinstance(read, tuple) else (read,))))
            return own.finish(state)

        return _with_parameters(own, parameters, whole, e)

    return call


def _with_parameters(
    module: nn.Module, parameters: dict[str, Tensor], body: Callable[..., Tensor], *inputs: Any
) -> Tensor:
    """Run a function of a module with other parameters."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any) -> Tensor:
            return body(self.module, *args)

    named = {f"module.{name}": p for name, p in parameters.items()}
    out: Tensor = torch.func.functional_call(Body(), named, inputs)
    return out


def lucidrains_hyper() -> Call:
    """Run the module HyperConnections of hyper-connections."""
    from hyper_connections import HyperConnections

    def call(p: dict[str, Tensor], e: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        make, expand, reduce = HyperConnections.get_init_and_expand_reduce_stream_functions(STREAMS)
        x = expand(e)
        for site in range(len(p["B"])):
            module = make(dim=e.shape[-1], layer_index=site)
            theirs = {
                "static_alpha": torch.cat([p["A_m"][site][:, None], p["A_r"][site]], dim=1),
                "dynamic_alpha_fn": torch.cat([p["W_m"][site][:, None], p["W_r"][site]], dim=1),
                "dynamic_alpha_scale": p["s_alpha"][site],
                "static_beta": p["B"][site],
                "dynamic_beta_fn": p["W_beta"][site],
                "dynamic_beta_scale": p["s_beta"][site],
            }
            read, add = torch.func.functional_call(module, theirs, (x,))
            x = add(sublayer(read))
        out: Tensor = reduce(x)
        return out

    return call


def lucidrains_dca() -> Call:
    """Run the GRNs of deep-cross-attention as its GPT does, with the whole stack."""
    from deep_cross_attention.dca_gpt import GRN

    def mixture(b: Tensor, w: Tensor, stack: list[Tensor]) -> Tensor:
        grn = GRN(stack[0].shape[-1], len(stack), num_outputs=len(b))
        out: Tensor = torch.func.functional_call(
            grn, {"bias": b, "to_aggregate.1.weight": w[:, 0]}, (torch.stack(stack),)
        )
        return out

    def call(p: dict[str, Tensor], e: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        stack = [e]
        for i in range(N_BLOCKS):
            q, k, v = mixture(p[f"b.{i}"], p[f"w.{i}"], stack) if i else (e, e, e)
            attended = sublayer(q, k, v)
            stack.append(sublayer(attended + q) + attended)
        return mixture(p[f"b.{N_BLOCKS}"], p[f"w.{N_BLOCKS}"], stack)

    return call


def fla_attnres(name: str) -> Callable[[], Call]:
    """Run an Attention Residuals operator of flash-linear-attention."""

    def build() -> Call:
        operator = getattr(importlib.import_module("fla.ops.attnres"), name)
        return _full_attnres(lambda sources, q, g: operator(q, sources, g, rms_eps=1e-6))

    return build


def liger_attnres() -> Call:
    """Run the Attention Residuals operator of Liger-Kernel."""
    operator = importlib.import_module("liger_kernel.transformers.functional").liger_attn_res
    return _full_attnres(lambda sources, q, g: operator(torch.stack(sources), q, g, 1e-6))


def _full_attnres(read: Callable[[list[Tensor], Tensor, Tensor], Tensor]) -> Call:
    def call(p: dict[str, Tensor], e: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        sources = [e]
        for query, gain in zip(p["query"][:-1], p["key_gain"][:-1], strict=True):
            sources.append(sublayer(read(sources, query, gain)))
        return read(sources, p["query"][-1], p["key_gain"][-1])

    return call


def liger_mhc(**options: Any) -> Callable[[], Call]:
    """Run the mHC operators of Liger-Kernel."""

    def build() -> Call:
        ops = importlib.import_module("liger_kernel.transformers.functional")

        def call(p: dict[str, Tensor], e: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
            x = e.unsqueeze(-2).expand(*e.shape[:-1], STREAMS, e.shape[-1]).contiguous()
            for phi, b, alpha in zip(p["phi"], p["b"], p["alpha"], strict=True):
                phi = phi.to(e.dtype)
                pre, post, res = ops.liger_mhc_coeffs(x, phi.contiguous(), b, *alpha, allow_fp32=True, **options)
                y = sublayer(ops.liger_mhc_pre(x, pre).to(e.dtype))
                x = ops.liger_mhc_post_res(x, y, post, res).to(e.dtype)
            return x.sum(-2)

        return call

    return build


class _Sublayer(nn.Module):
    """A sublayer of a layer of transformers that calls the check's."""

    def __init__(self, sublayer: Callable[..., Tensor], returned: int) -> None:
        super().__init__()
        self.sublayer, self.returned = sublayer, returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the next output, in the form of the layer's attention or MLP."""
        y = self.sublayer(args[0] if args else kwargs["hidden_states"])
        return (y, *[None] * (self.returned - 1)) if self.returned else y


def transformers_streams(family: str) -> Callable[[], Call]:
    """Run the decoder layers and the end of a family with streams, without the norms before sublayers."""

    def build() -> Call:
        from benchmarks.depth_models import RETURNED, depth_model

        def call(p: dict[str, Tensor], e: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
            model = depth_model(family, e.shape[-1], e.device, whole=False, small=True, dtype=torch.float32)
            layers = list(model.layers)[:N_BLOCKS]
            named: dict[str, Tensor] = {}
            for index, layer in enumerate(layers):
                layer.input_layernorm, layer.post_attention_layernorm = nn.Identity(), nn.Identity()
                linear = getattr(layer, "block_type", None) == "linear_attention"
                layer.self_attn = _Sublayer(sublayer, 0 if linear else RETURNED[family])
                layer.mlp = _Sublayer(sublayer, 0)
                for name, site in (("attn_hc", 2 * index), ("ffn_hc", 2 * index + 1)):
                    named |= {f"{index}.{name}.fn": p["phi"][site].T, f"{index}.{name}.base": p["b"][site]}
                    named[f"{index}.{name}.scale"] = p["alpha"][site]
            head = model.hc_head
            if "phi_head" in p:
                own = {"hc_fn": p["phi_head"].T, "hc_base": p["b_head"], "hc_scale": p["alpha_head"]}
                named |= {f"{len(layers)}.{name}": value for name, value in own.items()}

            def whole(modules: Any, x: Tensor) -> Tensor:
                *decoder, end = modules
                streams = x.unsqueeze(-2).expand(*x.shape[:-1], STREAMS, x.shape[-1]).contiguous()
                for layer in decoder:
                    out = layer(streams)
                    streams = out[0] if isinstance(out, tuple) else out
                read: Tensor = end(streams)
                return read

            return _with_parameters(nn.ModuleList([*layers, head]), named, whole, e)

        return call

    return build


def inkling() -> Call:
    """Run the sliding layers and the end of Inkling 2, whose blocks have one layer here, without norms and convolutions."""
    from benchmarks.depth_models import depth_model

    def call(p: dict[str, Tensor], e: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        model = depth_model("inkling2", e.shape[-1], e.device, whole=False, small=True, dtype=torch.float32)
        layers = [layer for layer in model.layers if layer.attention_type == "sliding_attention"][:N_BLOCKS]
        named = {}
        for index, layer in enumerate(layers):
            layer.input_layernorm, layer.post_attention_layernorm = nn.Identity(), nn.Identity()
            layer.post_attention_convolution, layer.post_mlp_convolution = _First(), _First()
            layer.self_attn, layer.mlp = _Sublayer(sublayer, 2), _Sublayer(sublayer, 0)
            if index:
                named[f"{index}.attention_input.query"] = p["query"][2 * index]
            named[f"{index}.mlp_input.query"] = p["query"][2 * index + 1]
        named[f"{len(layers)}.query"] = p["query"][-1]

        def whole(modules: Any, x: Tensor) -> Tensor:
            *decoder, end = modules
            blocks, state = x.new_zeros(*x.shape[:-1], 0, x.shape[-1]), x
            for layer in decoder:
                after = layer(state, blocks)
                if layer.is_block_boundary:
                    blocks = torch.cat([blocks, state.unsqueeze(-2)], dim=-2)
                state = after
            read: Tensor = end(blocks, state)[0]
            return read

        return _with_parameters(nn.ModuleList([*layers, model.final_input]), named, whole, e)

    return call


class _First(nn.Module):
    """A module that returns its first argument."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Return x."""
        return x


def subjects() -> list[Subject]:
    """Return what is checked, in the order of the table."""
    ours = [
        Subject("depthmix", "attnres", "attnres", lambda: mixer("attnres")),
        Subject("depthmix", "attnres, block_size=2", "attnres", lambda: mixer("attnres", block_size=2), None,
                {"block_size": 2}),
        Subject("depthmix", "dca", "dca", lambda: mixer("dca")),
        Subject("depthmix", "denseformer", "denseformer", lambda: mixer("denseformer")),
        Subject("depthmix", "hyper", "hyper", lambda: mixer("hyper")),
        Subject("depthmix", "mhc", "mhc", lambda: mixer("mhc"), "paper"),
        Subject("depthmix", "mhc, convention=deepseek, head=learned", "mhc",
                lambda: mixer("mhc", convention="deepseek", head="learned"), "deepseek", {"head": "learned"}),
    ]  # fmt: skip
    deepseek_head = {"head": "learned"}
    published = [
        Subject("transformers", "deepseek_v4", "mhc", transformers_streams("deepseek_v4"), "deepseek", deepseek_head),
        Subject("transformers", "glm5_next", "mhc", transformers_streams("glm5_next"), "deepseek",
                {"head": "mean", "eps": 1e-5}),
        Subject("transformers", "hy_v4", "mhc", transformers_streams("hy_v4"), "hy_v4"),
        Subject("transformers", "inkling2, one query per read", "attnres", inkling, "inkling2", {"block_size": 2}),
        Subject("liger-kernel", "liger_mhc_*", "mhc", liger_mhc(), "deepseek"),
        Subject("liger-kernel", "liger_mhc_*, pre_eps=1e-6", "mhc", liger_mhc(pre_eps=1e-6), "deepseek"),
        Subject("liger-kernel", "liger_mhc_*", "mhc", liger_mhc(), "paper"),
        Subject("liger-kernel", "liger_attn_res", "attnres", liger_attnres),
        Subject("fla-core", "naive_attnres", "attnres", fla_attnres("naive_attnres")),
        Subject("fla-core", "fused_attnres", "attnres", fla_attnres("fused_attnres")),
        Subject("hyper-connections", "HyperConnections", "hyper", lucidrains_hyper),
        Subject("hyper-connections", "HyperConnections", "hyper", lucidrains_hyper, None, {"norm": "rmsnorm"}),
        Subject("deep-cross-attention", "GRN, whole stack", "dca", lucidrains_dca),
    ]  # fmt: skip
    return [*ours, *published]


def check(subject: Subject, cases: Sequence[str] = ()) -> tuple[str, RuleReport | None]:
    """Return the diagnosis of a subject in one line, and the report. `cases` names the inputs; none means all."""
    try:
        call = subject.build()
    # A package may be missing, or fail to import where there is no GPU.
    except Exception as error:
        return f"not run: {type(error).__name__}: {' '.join(str(error).split())[:120]}", None
    report = check_rule(call, subject.rule, subject.convention, device=DEVICE, only=cases, **subject.options)
    return report.diagnosis, report


def version(package: str) -> str:
    """Return the version of a package, or nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """Check all subjects, print their reports, and write the table as it grows."""
    parser = argparse.ArgumentParser(description="Check published implementations of the rules.")
    parser.add_argument("--only", default="", help="only subjects whose package, name or rule contains this text")
    parser.add_argument("--out", default="benchmarks/results/conformance.md", help="file for the table")
    parser.add_argument(
        "--cases", nargs="+", default=[], help="only these inputs, such as random; Triton's interpreter is slow"
    )
    given = parser.parse_args()
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    lines = ["| package | what | compared with | diagnosis |", "|---|---|---|---|"]
    for subject in subjects():
        if given.only not in f"{subject.package} {subject.what} {subject.rule}":
            continue
        begun = time.perf_counter()
        diagnosis, report = check(subject, given.cases)
        compared = ", ".join([subject.rule, *filter(None, [subject.convention])])
        compared += "".join(f", {name}={value}" for name, value in subject.options.items())
        print(f"{subject.package} {version(subject.package)} {subject.what} ({time.perf_counter() - begun:.0f} s)")
        print(report if report is not None else diagnosis, flush=True)
        cells = [f"{subject.package} {version(subject.package)}".strip(), subject.what, compared, diagnosis]
        lines.append(f"| {' | '.join(cells)} |")
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        end = f"Checked on {date}, {where}, torch {torch.__version__}: `python -m benchmarks.conformance`."
        Path(given.out).write_text("\n".join([*lines, "", end]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
