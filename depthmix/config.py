"""One flat dataclass per command: every field is a flag of the command line and a line of a YAML recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from depthmix.names import DEFAULT_MIXER


def option(default: Any, help: str, first: bool = False) -> Any:
    """A field with its help text; lists and dictionaries are copied for every instance. first: its flag may be left out on the command line."""
    metadata = {"help": help, "first": first}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class DataConfig:
    """Prepare data: a corpus, for which a tokenizer is trained (or taken), or images; tokens or pixels are written to disk."""

    input: list[str] = option(
        [],
        "files or folders of text (.txt, .md and the like, source code), .jsonl or .parquet, all but the last also as .gz, or hf:NAME[:SPLIT] for a Hugging Face dataset; as NAME=PATH each is a domain, whose validation loss is reported apart",
    )
    images: str = option(
        "",
        "images in the place of a corpus: a folder with a folder of pictures for each class (or train/CLASS and val/CLASS), one with images.npy and labels.npy, or an .npz with images and labels",
    )
    image_size: int | None = option(None, "make pictures so high and wide, by their middle; none: all are of one size")
    out: str = option("", "folder to write")
    vocab_size: int = option(16384, "entries of the byte-level BPE trained on the corpus")
    tokenizer: str = option("", "a saved tokenizer.json to use instead of training one")
    text_field: str = option("text", "field or column that holds the text in jsonl and parquet")
    document: Literal["file", "line", "blank"] = option(
        "file", "what one document is in plain text: the file, a line, or paragraphs between two blank lines"
    )
    val_fraction: float = option(0.05, "share of the documents, or of the images of each class, kept for validation")
    seed: int = option(0, "seed of the split")
    overwrite: bool = option(False, "replace prepared data that is already there")


@dataclass
class TrainConfig:
    """Train one model: a language model on text, a vision transformer on images."""

    data: str = option("", "folder written by `depthmix data`")
    out: str = option(
        "", "run folder; an interrupted run found there goes on, as recorded in it where data is left out"
    )
    mixer: str = option(
        DEFAULT_MIXER, "how layers are mixed over depth, NAME or NAME:option=value,option=value (see `depthmix list`)"
    )
    mixer_options: dict[str, Any] = option({}, "options of the mixer, e.g. block_size=4 ways=3")
    init: str = option(
        "",
        "folder with a model to start from instead of random weights: a run, one checkpoint in it, or one of `depthmix retrofit` or `save_pretrained`; the model's shape is then its own, and a plain one takes any mixer that begins as plain",
    )
    tune: Literal["all", "mixer"] = option("all", "with init, what is trained: all, or what the mixer has added alone")

    dim: int = option(512, "width of the model")
    n_blocks: int = option(12, "Transformer blocks")
    n_heads: int = option(8, "attention heads")
    n_kv_heads: int | None = option(None, "key and value heads; none: as many as heads")
    head_dim: int | None = option(None, "width of a head; none: dim / heads")
    mlp: Literal["swiglu", "relu2"] = option("relu2", "kind of MLP")
    mlp_dim: int | None = option(None, "width of the MLP; none: 4 dim for relu2, 8/3 dim for swiglu")
    qk_norm: bool = option(True, "normalise queries and keys")
    qk_gain: bool = option(True, "learned gains on those norms")
    tie_embeddings: bool = option(False, "share the embedding with the head")
    rope_theta: float = option(10000.0, "base of the rotary positions")
    norm_eps: float = option(1e-6, "eps of the norms")
    embedding_std: float = option(0.02, "size of the embedding's numbers at the start")
    output_scale: float = option(
        1.0, "factor on the output projections at the start; 0: sublayers begin by adding nothing"
    )
    plain_eps: bool = option(
        False, "norms count eps as on the plain stream, of which reads begin as a share; init sets it"
    )
    patch_size: int = option(4, "images: height and width of a patch, in pixels")
    pool: Literal["token", "mean"] = option(
        "mean", "images: what the head reads, a class token or the mean of the patches"
    )
    positions: Literal["learned", "sincos"] = option("learned", "images: positions of the patches")
    crop: int = option(0, "images: move each by up to so many pixels each way, for training")
    flip: bool = option(False, "images: mirror half of them, for training")

    seq_len: int = option(512, "tokens in a sequence")
    batch_size: int = option(64, "sequences or images in a step")
    micro_batch_size: int | None = option(
        None, "sequences or images at a time (gradients accumulate); none: the whole batch"
    )
    steps: int = option(
        1200,
        "optimizer steps; more of them than before extend a run where its schedule allows (rsqrt; wsd until it decays)",
    )
    optimizer: Literal["adamw", "muon"] = option("adamw", "muon takes the hidden matrices, AdamW the rest")
    lr: float = option(1.5e-3, "peak learning rate")
    muon_lr: float = option(0.02, "peak learning rate of Muon")
    schedule: Literal["cosine", "wsd", "rsqrt"] = option(
        "cosine", "cosine; warm-up, stable, decay; or inverse square root"
    )
    warmup: int = option(100, "steps of linear warm-up")
    final_lr: float = option(0.05, "learning rate at the end, as a fraction of the peak (cosine, wsd)")
    decay_fraction: float = option(0.2, "share of the steps in which wsd decays")
    beta1: float = option(0.9, "AdamW's first moment")
    beta2: float = option(0.95, "AdamW's second moment")
    adam_eps: float = option(1e-8, "AdamW's eps")
    weight_decay: float = option(0.1, "on matrices only")
    groups: list[dict[str, Any]] = option(
        [],
        "parameters with an lr (a factor) or weight_decay of their own, the first that match, e.g. match=mixer.b.*,lr=0.1,weight_decay=0.1",
    )
    clip: float = option(1.0, "largest norm of the gradient; 0: no clipping")
    seed: int = option(0, "seed of the initial weights and of the data order")

    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto")
    precision: Literal["auto", "fp32", "bf16"] = option("auto", "auto: bf16 autocast on a GPU, fp32 elsewhere")
    compile: Literal["off", "sublayers", "model"] = option(
        "off", "compile each sublayer and norm, or the whole model as one graph"
    )
    cuda_graph: bool = option(
        False, "on a GPU, record a step's forward and backward once and replay it: no launch costs"
    )
    checkpoint_activations: bool = option(False, "recompute sublayers in the backward to save memory")
    deterministic: bool = option(
        False, "sums in a fixed order: on a GPU, too, one seed gives the same losses bit for bit"
    )
    parallel: dict[str, Any] = option(
        {},
        "processes of torchrun: dp=2 replicas, shard=4 parts of everything (FSDP2), cp=2 parts of sequences, tp=2 of matrices and sequences, pp=2 parts of the depth",
    )
    hang_limit: float = option(
        300.0,
        "with parallel, end the run after so many seconds without progress of any process, and name the one that hangs; the start, the first step, the first evaluation and saving may take four times as long",
    )

    log_every: int = option(10, "steps between lines of the metrics")
    eval_every: int = option(100, "steps between evaluations; the last step is always evaluated")
    eval_tokens: int | None = option(None, "validation tokens to use; none: all")
    save_every: int = option(200, "steps between checkpoints; the last step is always saved")
    keep: int = option(2, "checkpoints to keep")
    dynamics_every: int | None = option(
        None, "steps between lines of dynamics.jsonl, magnitudes and gradients over depth; none: no such lines"
    )
    on_nan: Literal["stop", "skip"] = option("stop", "what to do when the loss is not a number or explodes")
    tensorboard: bool = option(False, "also write TensorBoard events")
    wandb: str = option("", "also log to this Weights & Biases project")
    quiet: bool = option(False, "no progress bar")


# What may change when a run goes on; of the data that is the place, the content is compared.
FREE = {"data", "out", "quiet", "tensorboard", "wandb", "keep", "save_every", "log_every", "dynamics_every"}
FREE |= {"device", "on_nan", "parallel", "hang_limit"}

# What of it means nothing to the other kind of data.
OF_TEXT = ("seq_len", "tie_embeddings", "rope_theta", "eval_tokens", "init", "tune", "embedding_std", "plain_eps")
OF_IMAGES = ("patch_size", "pool", "positions", "crop", "flip")


@dataclass
class CompareConfig(TrainConfig):
    """Train several mechanisms on the same data in the same order and compare them at equal cost."""

    arms: list[str] = option(
        [],
        "mechanisms, each NAME or NAME:option=value,option=value; the first is what the others are compared with",
    )
    seeds: list[int] = option([0], "seeds; every arm runs once with each")
    budget: Literal["tokens", "time"] = option(
        "tokens", "tokens: every arm the same steps; time: as many steps as fit into the first arm's time"
    )
    prompt: str = option("", "text every model continues at the end; none: no sample")
    sample_tokens: int = option(60, "tokens of that sample")
    accept_code: str = option(
        "", "REASON why runs made by different code may stand in one table; it is kept and written under the table"
    )


@dataclass
class StudyConfig:
    """Run what is missing of a study, a file of arms and seeds, and write its table and figures."""

    study: str = option("", "name of a file in recipes/studies, or a path; also as the first word", first=True)
    data: list[str] = option(
        [], "folder of the prepared data, or DOMAIN=FOLDER for each domain; none: as the study says"
    )
    arms: list[str] = option([], "run only these arms, by the names in its table")
    sizes: list[str] = option([], "run only these sizes")
    seeds: list[int] = option([], "run only these seeds")
    out: str = option("", "folder for the results; none: docs/results/NAME, whose results count in any case")
    results: list[str] = option([], "more files of results, say of another machine")
    minutes: float = option(0.0, "end within so many minutes: a run that would take longer is not begun; 0: no limit")
    report: bool = option(False, "run nothing: table and figures again from the results")
    accept_code: str = option("", "REASON why results of other code count; it is kept and written into the table")
    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto")
    quiet: bool = option(False, "no progress bar")


@dataclass
class ReportConfig:
    """Write one page to open in a browser: what runs learnt, what it cost, and what their layers read from each other."""

    run: list[str] = option([], "folders of `depthmix train`, or of `depthmix compare` with all its arms", first=True)
    out: str = option("report.html", "page to write; figures for papers go into the folder figures beside it")
    input: list[str] = option([], "files or folders of text to measure on; none: the validation split of the data")
    data: str = option(
        "", "folder written by `depthmix data` to measure on; none: the one the models were trained with"
    )
    text: str = option("", "a text to show token by token; none: the beginning of the validation split")
    tokens: int = option(20000, "tokens to measure depth-mixing matrices on")
    causal_tokens: int = option(
        4096, "tokens to measure cut connections and skipped sublayers on, which takes longest; 0: leave both out"
    )
    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto")


@dataclass
class PlanConfig(CompareConfig):
    """What a recipe needs and how fast it would run on GPUs that are not here: memory, communication and step time of every arm."""

    gpus: int = option(1, "GPUs")
    gpu: str = option("h200", "their kind: h100, h200 or b200")
    layout: str = option("", "how they share the work, e.g. dp=4,tp=2,pp=1,virtual=1; none: the fastest that fits")
    vocab_size: int | None = option(None, "entries of the vocabulary; none: 16384")
    params: float = option(0.0, "parameters in all, of a model with experts; 0: those of the decoder")
    active_params: float = option(0.0, "parameters that a token meets; 0: all")
    prefill: int = option(0, "tokens of a prompt whose depth state is to be told; 0: none")
    chunk: int | None = option(None, "tokens of it at a time; none: all")
    figure: str = option(
        "", "file for a figure of this model's pipelines: waiting and communication with up to 16 ranks"
    )


@dataclass
class EvalConfig:
    """Measure a trained model on any text: loss, perplexity, bits per byte; or one of images on what it was validated with: loss, accuracy."""

    run: str = option(
        "", "run folder of `depthmix train`, one checkpoint in it, or a folder of `save_pretrained`", first=True
    )
    input: list[str] = option([], "files or folders of text; none: the validation split the model was trained with")
    text_field: str = option("text", "field or column that holds the text in jsonl and parquet")
    batch_size: int = option(16, "sequences at a time")
    seq_len: int | None = option(None, "tokens in a sequence; none: as in training")
    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto")
    json: bool = option(False, "print JSON")


@dataclass
class GenerateConfig:
    """Continue a text with a trained model."""

    run: str = option(
        "", "run folder of `depthmix train`, one checkpoint in it, or a folder of `save_pretrained`", first=True
    )
    prompt: str = option("", "text to continue; none: start from nothing")
    max_tokens: int = option(100, "tokens to generate")
    temperature: float = option(0.8, "0 always takes the likeliest token")
    top_p: float = option(0.95, "sample from the likeliest tokens that together have this probability")
    seed: int = option(0, "seed of the sampling")
    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto")


@dataclass
class RetrofitConfig:
    """Give a pretrained decoder another rule for mixing over depth; its logits stay the same until it is trained."""

    model: str = option(
        "", "folder of `save_pretrained`, or run folder, with the model, which is left as it is", first=True
    )
    mixer: str = option("", "mechanism, NAME or NAME:option=value,option=value; `depthmix list` shows them")
    mixer_options: dict[str, Any] = option({}, "options of the mixer, e.g. block_size=4 ways=3")
    out: str = option(
        "",
        "folder to write, which must not exist; `depthmix train --init` and AutoModelForCausalLM.from_pretrained read it",
    )


@dataclass
class InspectConfig:
    """Look inside a trained model: what layers read from each other, magnitudes over depth, which connections matter."""

    run: str = option(
        "", "run folder of `depthmix train`, one checkpoint in it, or a folder of `save_pretrained`", first=True
    )
    input: list[str] = option([], "files or folders of text to measure on; none: the validation split of the data")
    data: str = option("", "folder written by `depthmix data`; none: the one the model was trained with")
    text_field: str = option("text", "field or column that holds the text in jsonl and parquet")
    text: str = option("", "a text to show token by token")
    tokens: int = option(20000, "tokens to measure depth-mixing matrices on")
    causal_tokens: int = option(
        4096, "tokens to measure cut connections and skipped sublayers on, which takes longest; 0: leave both out"
    )
    batch_size: int = option(8, "sequences at a time")
    seq_len: int | None = option(None, "tokens in a sequence; none: as in training")
    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto")
    json: str = option("", "file to write everything to")


@dataclass
class ExploreConfig:
    """Look into a trained model in a browser: type a text, choose a token, see where each site read it from."""

    run: str = option(
        "", "run folder of `depthmix train`, one checkpoint in it, or a folder of `save_pretrained`", first=True
    )
    against: str = option("", "another, to be shown beside it; also as the second word", first=True)
    text: str = option("", "a text to begin with; none: a sentence of ours")
    seq_len: int | None = option(None, "longest text, in tokens; none: the length of the sequences in training")
    host: str = option("127.0.0.1", "address to listen on; any but this machine's own lets others in")
    port: int = option(0, "port to listen on; 0: any that is free")
    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto")
