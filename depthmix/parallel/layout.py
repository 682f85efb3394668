"""Layout of a run's processes: the recipe's line `parallel`, and its requirements on the rest of the recipe.

    parallel: {dp: 4}             four replicas (DDP)
    parallel: {shard: 8}          parameters, gradients and optimizer in eight parts (FSDP2)
    parallel: {dp: 2, shard: 8}   two replicas of eight parts each (HSDP)
    parallel: {shard: 4, tp: 2}   matrices and sequences in two parts (tensor and sequence parallelism), each of those in four
    parallel: {dp: 2, cp: 4}      two replicas, each with every sequence in four parts, also in attention (context parallelism)
    parallel: {pp: 4, virtual: 2, schedule: Interleaved1F1B, microbatches: 8}   a pipeline of four, each with two stages

The product of dp, shard, cp, tp and pp is the number of processes. A batch is divided among dp x shard of them; cp or tp processes
work on the same sequences, and the pp processes of a pipeline pass them on, some at a time: own = microbatches x micro_batch_size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from depthmix.config import TrainConfig
from depthmix.errors import UserError
from depthmix.models import DecoderConfig, VitConfig
from depthmix.names import nearest

SIZES = ("dp", "shard", "cp", "tp", "pp")
OF_PIPELINES = ("virtual", "schedule", "microbatches")
NAMES = (*SIZES, *OF_PIPELINES)


@dataclass(frozen=True)
class Layout:
    """Number of processes along each dimension. shard=None: parameters are not sharded.

    For pipelines: `virtual` stages per process, a `schedule` (None: the default), and `microbatches` (None: derived
    from the rest).
    """

    dp: int = 1
    shard: int | None = None
    cp: int = 1
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    schedule: str | None = None
    microbatches: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Layout:
        """Read the recipe's line. Raises UserError if it is invalid."""
        for name, value in given.items():
            if name not in NAMES:
                raise UserError(f"parallel has {', '.join(NAMES)}, not {name!r}{nearest(name, NAMES)}")
            if name == "schedule":
                if not isinstance(value, str):
                    raise UserError(f"parallel: schedule must be a name, such as 1F1B, got {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"parallel: {name} must be a whole number of at least 1, got {value!r}")
            if name in OF_PIPELINES and given.get("pp", 1) == 1:
                raise UserError(f"parallel: {name} is for pipelines, and pp is 1")
        return cls(**given)

    @property
    def data(self) -> int:
        """Number of processes that a batch is divided among."""
        return self.dp * (self.shard or 1)

    @property
    def size(self) -> int:
        """Number of all processes."""
        return self.data * self.cp * self.tp * self.pp

    @property
    def sharded(self) -> bool:
        """True if FSDP2 holds the parameters. It also does with tp and pp, which DDP does not support."""
        return self.shard is not None or (self.dp > 1 and (self.tp > 1 or self.pp > 1))

    @property
    def order(self) -> str:
        """Schedule of the pipeline."""
        return self.schedule or ("1F1B" if self.virtual == 1 else "Interleaved1F1B")

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return a process's index in its pipeline, among those that divide a batch, and among those that share its
        sequences.
        """
        sharing = self.cp * self.tp
        return rank // (self.data * sharing), rank // sharing % self.data, rank % sharing

    def micro_batch_size(self, config: TrainConfig) -> int | None:
        """Return the sequences per forward pass of a process; None: all of its own. The default of a pipeline is one."""
        sequences = config.batch_size // self.data
        if self.pp == 1 or config.micro_batch_size is not None:
            return config.micro_batch_size
        return 1 if self.microbatches is None else sequences // self.microbatches

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in SIZES if name != "pp" or self.pp > 1}
        return " x ".join(f"{name} {n}" for name, n in sizes.items() if n is not None)

    def check_world(self, size: int, given: bool) -> None:
        """Raise UserError if another number of processes was started. `given`: whether the recipe has the line."""
        if self.size == size:
            return
        if not given:
            advice = f"give them a layout, such as `parallel: {{dp: {size}}}`"
            raise UserError(f"torchrun has started {size} processes and the recipe has no line `parallel`: {advice}")
        start = f"torchrun --nproc-per-node {self.size} -m depthmix train …"
        ran = f"torchrun has started {size}" if size > 1 else "1 is here"
        raise UserError(f"parallel: {self} needs {self.size} processes and {ran}; start `{start}`")

    def check(self, config: TrainConfig, model: DecoderConfig | VitConfig | None) -> None:
        """Raise UserError, with the reason, for a recipe that cannot run with this layout."""
        if config.batch_size % self.data:
            what = f"batch_size={config.batch_size} must be a multiple of {self.data}"
            raise UserError(f"parallel: {what}, for every process takes as many sequences (dp x shard)")
        sequences, micro = config.batch_size // self.data, config.micro_batch_size
        if micro is not None and sequences % micro:
            what = f"micro_batch_size={micro} must divide {sequences}"
            raise UserError(f"parallel: {what}, the sequences of one process ({config.batch_size} / {self.data})")
        if config.cuda_graph and self.size > 1:
            raise UserError("cuda_graph records the step of one process: leave it out with parallel")
        if config.compile == "model" and (self.sharded or self.tp > 1 or self.cp > 1):
            raise UserError(
                "compile=model cannot see into shards that come and go: use compile=sublayers with parallel"
            )
        if config.compile == "model" and self.pp > 1:
            raise UserError("compile=model needs the model in one piece, and pp divides it: use compile=sublayers")
        if config.optimizer == "muon" and (self.sharded or self.tp > 1):
            raise UserError("muon needs whole matrices: use adamw, or dp or pp alone, with parallel")
        for name in ("cp", "tp"):
            if getattr(self, name) == 1:
                continue
            if config.dynamics_every is not None:
                what = f"dynamics_every looks at whole sequences, of which {name} leaves a part"
                raise UserError(f"{what}: leave one of them out")
            if not isinstance(model, DecoderConfig):
                raise UserError(f"parallel: {name} divides the sequences of text: use dp or shard for images")
        if self.cp > 1:
            self._check_context_parallel(config)
        mixes_values = isinstance(model, DecoderConfig) and (model.value_residual != "off" or model.value_embeddings)
        if mixes_values and (self.tp > 1 or self.pp > 1):
            what = "value_residual and value_embeddings need every head's values and the token ids in every block"
            raise UserError(f"parallel: {what}, which tp and pp divide: use dp, shard or cp")
        if isinstance(model, DecoderConfig) and self.tp > 1:
            self._check_tensor_parallel(config, model)
        if self.pp > 1:
            self._check_pipeline(config, model)

    def _check_context_parallel(self, config: TrainConfig) -> None:
        if self.tp > 1:
            raise UserError("parallel: cp and tp both divide sequences: use one of them, with dp or shard")
        if self.pp > 1:
            raise UserError("parallel: the stages of a pipeline take whole sequences: use cp or pp, with dp or shard")
        if config.seq_len % (2 * self.cp):
            what = f"seq_len={config.seq_len} must be a multiple of {2 * self.cp}"
            raise UserError(f"parallel: {what}, for every process takes two chunks of a sequence (cp={self.cp})")

    def _check_tensor_parallel(self, config: TrainConfig, model: DecoderConfig) -> None:
        parts = {"n_heads": model.n_heads, "n_kv_heads": model.n_kv_heads, "mlp_dim": model.mlp_dim}
        for name, n in {**parts, "seq_len": config.seq_len}.items():
            if n % self.tp:
                raise UserError(f"parallel: tp={self.tp} must divide {name}={n}, of which every process takes a part")
        if model.vocab_size < self.tp:
            raise UserError(f"parallel: tp={self.tp} is more than the vocabulary of {model.vocab_size}")

    def _check_pipeline(self, config: TrainConfig, model: DecoderConfig | VitConfig | None) -> None:
        # Slow to import.
        from depthmix.parallel.pipeline import check_pipeline

        if not isinstance(model, DecoderConfig):
            raise UserError("parallel: pp divides models of text: use dp or shard for images")
        if config.dynamics_every is not None:
            raise UserError("dynamics_every looks at the whole depth, of which pp leaves a part: leave one of them out")
        sequences, micros = config.batch_size // self.data, self.microbatches
        micro = self.micro_batch_size(config) or 1
        if config.micro_batch_size is not None and micros is not None and micros * micro != sequences:
            product = f"microbatches={micros} of micro_batch_size={micro} make {micros * micro} sequences"
            raise UserError(f"parallel: {product}, and a pipeline has {sequences} in a step: leave one of them out")
        check_pipeline(model, self, self.order, micros or sequences // micro, sequences)
