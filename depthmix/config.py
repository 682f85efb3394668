"""Flat dataclasses of options, one per command. Every field is a flag of the command line and a line of a YAML recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from depthmix.names import DEFAULT_MIXER


def option(default: Any, help: str, first: bool = False, flag: bool = True) -> Any:
    """Make a dataclass field that carries a help text.

    Args:
        default: The field's default. Lists and dictionaries are copied for every instance.
        help: The help text: an imperative or a noun, then the consequence.
        first: Whether the value may come as a word of its own, without its flag.
        flag: Whether the command line has a flag for it. Nested values can stand in a recipe only.
    """
    metadata = {"help": help, "first": first, "flag": flag}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class DataConfig:
    """Prepare text or images for training: tokens or pixels on disk, with a tokenizer trained on the text or taken as given."""

    input: list[str] = option(
        [],
        "Files or folders of text (.txt, .md, source code), .jsonl or .parquet; all but .parquet also as .gz. hf:NAME[:SPLIT] reads a Hugging Face dataset. NAME=PATH declares a domain, whose validation loss is reported separately",
    )
    images: str = option(
        "",
        "Images to prepare instead of text: a folder with one subfolder per class (or train/CLASS and val/CLASS), a folder with images.npy and labels.npy, or an .npz with images and labels",
    )
    image_size: int | None = option(
        None,
        "Height and width in pixels, resized and cropped around the centre; none: all images already have one size",
    )
    out: str = option("", "Folder to write the prepared data to")
    vocab_size: int = option(16384, "Entries of the byte-level BPE tokenizer trained on the corpus")
    tokenizer: str = option("", "Saved tokenizer.json to use instead of training a tokenizer")
    text_field: str = option("text", "Field or column with the text in .jsonl and .parquet")
    document: Literal["file", "line", "blank"] = option(
        "file", "Unit of plain text that is one document: the file, a line, or a paragraph between blank lines"
    )
    val_fraction: float = option(0.05, "Fraction kept for validation, of the documents or of the images of each class")
    seed: int = option(0, "Seed of the train/validation split")
    overwrite: bool = option(False, "Replace prepared data that already exists in the output folder")


@dataclass
class TrainConfig:
    """Train one model: a language model on text, or a vision transformer on images."""

    data: str = option("", "Folder written by `depthmix data`")
    out: str = option(
        "", "Run folder. An interrupted run in it is resumed, with its recorded options where data is left out"
    )
    mixer: str = option(
        DEFAULT_MIXER, "Rule for mixing over depth, as NAME or NAME:option=value,option=value (see `depthmix list`)"
    )
    mixer_options: dict[str, Any] = option({}, "Options of the mixer, e.g. block_size=4 ways=3")
    init: str = option(
        "",
        "Model folder to start from instead of random weights: a run, one of its checkpoints, or a folder of `depthmix retrofit` or `save_pretrained`. The model keeps its own shape; a residual model takes any mixer that starts as plain residuals",
    )
    tune: Literal["all", "mixer"] = option(
        "all", "Parameters to train with init: all of them, or only those that the mixer added"
    )

    dim: int = option(512, "Width of the model")
    n_blocks: int = option(12, "Number of Transformer blocks")
    n_heads: int = option(8, "Number of attention heads")
    n_kv_heads: int | None = option(None, "Number of key and value heads; none: n_heads")
    head_dim: int | None = option(None, "Width of a head; none: dim / n_heads")
    mlp: Literal["swiglu", "relu2"] = option("relu2", "Type of MLP")
    mlp_dim: int | None = option(None, "Width of the MLP; none: 4 dim for relu2, 8/3 dim for swiglu")
    qk_norm: bool = option(True, "Normalise queries and keys")
    qk_gain: bool = option(True, "Learn gains on the query and key norms")
    tie_embeddings: bool = option(False, "Share the weights of the embedding and the head")
    rope_theta: float = option(10000.0, "Base of the rotary position embedding")
    norm_eps: float = option(1e-6, "eps of the norms")
    embedding_std: float = option(0.02, "Standard deviation of the initial embedding")
    embedding_norm: bool = option(False, "Normalise the embedding, without learned gains, before the first block")
    output_scale: float = option(
        1.0, "Factor on the initial output projections; 0: every sublayer starts by adding nothing"
    )
    value_residual: Literal["off", "learnable", "sparse"] = option(
        "off",
        "Mix the first block's values into those of later blocks (ResFormer): of all, or of the last three eighths",
    )
    value_embeddings: bool = option(
        False, "Add a gated embedding of the token to the values of every second block, as nanochat does"
    )
    plain_eps: bool = option(
        False, "Scale each norm's eps to the initial share of the residual stream that the norm reads; init sets this"
    )
    patch_size: int = option(4, "Images: height and width of a patch, in pixels")
    pool: Literal["token", "mean"] = option(
        "mean", "Images: input of the head, a class token or the mean over the patches"
    )
    positions: Literal["learned", "sincos"] = option("learned", "Images: position embedding of the patches")
    crop: int = option(0, "Images: shift each training image by up to this many pixels in each direction")
    flip: bool = option(False, "Images: mirror half of the training images")

    seq_len: int = option(512, "Tokens per sequence")
    batch_size: int = option(64, "Sequences or images per step")
    micro_batch_size: int | None = option(
        None, "Sequences or images per forward pass, with gradient accumulation; none: the whole batch"
    )
    steps: int = option(
        1200,
        "Optimizer steps. A larger number extends a finished run if its schedule allows it (rsqrt; wsd before its decay)",
    )
    optimizer: Literal["adamw", "muon"] = option(
        "adamw", "Optimizer; muon updates the hidden matrices with Muon and everything else with AdamW"
    )
    lr: float = option(1.5e-3, "Peak learning rate")
    muon_lr: float = option(0.02, "Peak learning rate of Muon")
    schedule: Literal["cosine", "wsd", "rsqrt"] = option(
        "cosine", "Learning rate schedule: cosine; wsd (warmup, stable, decay); rsqrt (inverse square root)"
    )
    warmup: int = option(100, "Steps of linear warmup")
    final_lr: float = option(0.05, "Final learning rate as a fraction of the peak (cosine, wsd)")
    decay_fraction: float = option(0.2, "Fraction of the steps in which wsd decays")
    beta1: float = option(0.9, "AdamW's decay rate of the first moment")
    beta2: float = option(0.95, "AdamW's decay rate of the second moment")
    adam_eps: float = option(1e-8, "AdamW's eps")
    weight_decay: float = option(0.1, "Weight decay, applied to matrices only")
    groups: list[dict[str, Any]] = option(
        [],
        "Parameter groups with their own lr (a factor), weight_decay, beta1 or beta2; the first match applies, e.g. match=mixer.b.*,lr=0.1,weight_decay=0.1",
    )
    clip: float = option(1.0, "Maximum gradient norm; 0: no clipping")
    seed: int = option(0, "Seed of the initial weights and of the data order")

    device: str = option("auto", "Device: cpu, cuda, cuda:N, mps or auto")
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", "Precision; auto: bf16 autocast on a GPU, fp32 elsewhere"
    )
    compile: Literal["off", "sublayers", "model"] = option(
        "off", "Compile with torch.compile each sublayer and norm, or the whole model as one graph"
    )
    cuda_graph: bool = option(
        False,
        "On a GPU, record the forward and backward pass as a CUDA graph and replay it, which saves the kernel launch overhead",
    )
    checkpoint_activations: bool = option(
        False, "Recompute sublayers in the backward pass, which saves memory and takes time"
    )
    deterministic: bool = option(
        False, "Add in a fixed order, so that a seed gives the same losses bit for bit on a GPU too"
    )
    parallel: dict[str, Any] = option(
        {},
        "Layout of the processes that torchrun started: dp=2 (replicas), shard=4 (FSDP2), cp=2 (context parallel), tp=2 (tensor and sequence parallel), pp=2 (pipeline stages)",
    )
    hang_limit: float = option(
        300.0,
        "Seconds without progress of any process after which a parallel run ends and names the process that hangs. The start, the first step, the first evaluation and saving may take four times as long",
    )

    log_every: int = option(10, "Steps between lines of the metrics")
    eval_every: int = option(100, "Steps between evaluations; the last step is always evaluated")
    eval_tokens: int | None = option(None, "Validation tokens per evaluation; none: all")
    save_every: int = option(200, "Steps between checkpoints; the last step is always saved")
    keep: int = option(2, "Number of checkpoints to keep")
    dynamics_every: int | None = option(
        None,
        "Steps between lines of dynamics.jsonl, which hold magnitudes and gradient norms over depth; none: do not write that file",
    )
    on_nan: Literal["stop", "skip"] = option(
        "stop", "Action when the loss is not a number or explodes: stop the run, or skip the batch"
    )
    tensorboard: bool = option(False, "Also write TensorBoard events")
    wandb: str = option("", "Weights & Biases project to log to as well")
    quiet: bool = option(False, "Hide the progress bar")


# Options that may change when a run is resumed. The data may move to another folder; their content is compared.
FREE = {"data", "out", "quiet", "tensorboard", "wandb", "keep", "save_every", "log_every", "dynamics_every"}
FREE |= {"device", "on_nan", "parallel", "hang_limit"}

# Options of TrainConfig that apply to one kind of data only.
OF_TEXT = (
    "seq_len",
    "tie_embeddings",
    "rope_theta",
    "eval_tokens",
    "init",
    "tune",
    "embedding_std",
    "embedding_norm",
    "plain_eps",
    "value_residual",
    "value_embeddings",
)
OF_IMAGES = ("patch_size", "pool", "positions", "crop", "flip")


@dataclass
class CompareConfig(TrainConfig):
    """Train several models on the same data in the same order and compare them at equal cost. The same command resumes
    a comparison that was interrupted.
    """

    eval_every: int = option(100, "Steps between evaluations; the last step is always evaluated; 0: only the last step")
    arms: list[Any] = option(
        [],
        "Models to compare, each a rule as NAME or NAME:option=value,option=value; the first is the baseline. In a recipe an arm may also be {label, mixer, set, seeds, sizes}",
    )
    seeds: list[int] = option([0], "Seeds; every arm runs once per seed")
    budget: Literal["tokens", "time"] = option(
        "tokens",
        "Budget that all arms share. tokens: the same number of steps; time: the number of steps that fit into the baseline's time",
    )
    domains: dict[str, Any] = option(
        {}, "Folders of prepared data by name, NAME=PATH, to compare the models on each of them; instead of data"
    )
    sizes: dict[str, Any] = option(
        {}, "Options of the model or its training by name, to compare the models at each of these sizes", flag=False
    )
    only: list[str] = option([], "Run only these arms, seeds, sizes and domains; the rest stays to be done")
    jobs: int = option(
        1, "Number of concurrent runs on the CPU, each in a process of its own with its share of the cores"
    )
    minutes: float = option(0.0, "Time limit in minutes; a run that would take longer is not started; 0: no limit")
    save_models: bool = option(
        True, "Keep a folder for every run, with checkpoints to resume from; without, only the results are kept"
    )
    step_times: bool = option(
        False, "Measure step times in turns once all runs are done, for the costs in the table; at equal time always"
    )
    report: bool = option(False, "Run nothing; rewrite the table, the figures and the report from the results")
    results: list[str] = option([], "Further files of results (runs.jsonl), for example from another machine")
    question: str = option("", "Question that the comparison answers, for the table")
    notes: list[str] = option([], "Sentences to print below the table", flag=False)
    power: dict[str, Any] = option(
        {},
        "difference: the difference that matters, in nats; spread: how much a paired difference varies from seed to seed (standard deviations)",
        flag=False,
    )
    sections: list[Literal["stability", "depth"]] = option(
        [], "Further sections of the table: stability over learning rates, magnitudes over depth", flag=False
    )
    modules: list[str] = option(
        [],
        "Python files that register rules of your own, or folders of such files, from the recipe's folder",
        flag=False,
    )
    prompt: str = option("", "Text that every model continues at the end; none: no sample")
    sample_tokens: int = option(60, "Tokens to generate after the prompt")
    accept_code: str = option(
        "",
        "REASON why runs made by different versions of the code may share a table; it is stored and printed below the table",
    )


@dataclass
class ReportConfig:
    """Write one HTML page about runs: what they learnt, what they cost and what their layers read from each other."""

    run: list[str] = option([], "Folders of `depthmix train`, or of `depthmix compare` with all its arms", first=True)
    out: str = option("report.html", "HTML page to write; figures for papers go to the folder figures next to it")
    input: list[str] = option([], "Files or folders of text to measure on; none: the validation split of the data")
    data: str = option(
        "", "Folder written by `depthmix data` to measure on; none: the one the models were trained with"
    )
    text: str = option("", "Text to show token by token; none: the start of the validation split")
    tokens: int = option(20000, "Tokens to measure depth-mixing matrices on")
    causal_tokens: int = option(
        4096, "Tokens to measure cut connections and skipped sublayers on, the slowest part; 0: leave both out"
    )
    device: str = option("auto", "Device: cpu, cuda, cuda:N, mps or auto")


@dataclass
class PlanConfig(CompareConfig):
    """Estimate the memory, communication and step time of every arm of a recipe, on GPUs that need not be present."""

    gpus: int = option(1, "Number of GPUs")
    gpu: str = option("h200", "Type of GPU: h100, h200 or b200")
    layout: str = option("", "Parallel layout, e.g. dp=4,tp=2,pp=1,virtual=1; none: the fastest that fits")
    vocab_size: int | None = option(None, "Entries of the vocabulary; none: 16384")
    params: float = option(0.0, "Total parameters of a mixture-of-experts model; 0: those of the decoder")
    active_params: float = option(0.0, "Parameters that each token uses; 0: all")
    prefill: int = option(0, "Prompt tokens for which to report the size of the depth state; 0: none")
    chunk: int | None = option(None, "Prompt tokens per forward pass; none: all")
    figure: str = option(
        "", "File for a figure of this model's pipelines: waiting and communication with up to 16 ranks"
    )


@dataclass
class EvalConfig:
    """Measure a trained model: loss, perplexity and bits per byte on any text; loss and accuracy on its validation images."""

    run: str = option(
        "", "Run folder of `depthmix train`, one of its checkpoints, or a folder of `save_pretrained`", first=True
    )
    input: list[str] = option([], "Files or folders of text; none: the validation split the model was trained with")
    text_field: str = option("text", "Field or column with the text in .jsonl and .parquet")
    batch_size: int = option(16, "Sequences per forward pass")
    seq_len: int | None = option(None, "Tokens per sequence; none: as in training")
    device: str = option("auto", "Device: cpu, cuda, cuda:N, mps or auto")
    json: bool = option(False, "Print JSON")
    accelerate: bool = option(
        False, "Run the mixing of a Hugging Face model that mixes over depth by itself on depthmix's operators"
    )


@dataclass
class GenerateConfig:
    """Continue a text with a trained model."""

    run: str = option(
        "", "Run folder of `depthmix train`, one of its checkpoints, or a folder of `save_pretrained`", first=True
    )
    prompt: str = option("", "Text to continue; none: start from nothing")
    max_tokens: int = option(100, "Maximum number of tokens to generate")
    temperature: float = option(0.8, "Sampling temperature; 0: always take the most likely token")
    top_p: float = option(0.95, "Sample from the most likely tokens whose probabilities sum to this")
    seed: int = option(0, "Seed of the sampling")
    device: str = option("auto", "Device: cpu, cuda, cuda:N, mps or auto")
    accelerate: bool = option(
        False, "Run the mixing of a Hugging Face model that mixes over depth by itself on depthmix's operators"
    )


@dataclass
class RetrofitConfig:
    """Give a pretrained decoder another rule for mixing over depth. Its logits stay the same until it is trained."""

    model: str = option("", "Folder of `save_pretrained`, or run folder, with the model; it is not changed", first=True)
    mixer: str = option(
        "", "Rule for mixing over depth, as NAME or NAME:option=value,option=value (see `depthmix list`)"
    )
    mixer_options: dict[str, Any] = option({}, "Options of the mixer, e.g. block_size=4 ways=3")
    out: str = option("", "New folder to write, for `depthmix train --init` and AutoModelForCausalLM.from_pretrained")


@dataclass
class AccelerateConfig:
    """Check depthmix.hf.accelerate on a model that mixes over depth: results in fp32, and times before and after."""

    model: str = option(
        "",
        "Folder of a Hugging Face model, or its config.json. Without weights, or with layers or experts, weights are random and the vocabulary is small",
        first=True,
    )
    layers: int | None = option(None, "Layers of a model with random weights; none: at most 4")
    experts: int | None = option(None, "Experts of a layer of a model with random weights; none: at most 8")
    tokens: int = option(256, "Tokens per sequence")
    batch_size: int = option(1, "Sequences per pass")
    repeats: int = option(5, "Passes of each kind, of which the table has the median")
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", "Precision of the timed passes; auto: bf16 on a GPU, fp32 elsewhere"
    )
    device: str = option("auto", "Device: cpu, cuda, cuda:N, mps or auto")


@dataclass
class InspectConfig:
    """Look inside a trained model: what layers read from each other, magnitudes over depth, which connections matter."""

    run: str = option(
        "", "Run folder of `depthmix train`, one of its checkpoints, or a folder of `save_pretrained`", first=True
    )
    input: list[str] = option([], "Files or folders of text to measure on; none: the validation split of the data")
    data: str = option("", "Folder written by `depthmix data`; none: the one the model was trained with")
    text_field: str = option("text", "Field or column with the text in .jsonl and .parquet")
    text: str = option("", "Text to show token by token")
    tokens: int = option(20000, "Tokens to measure depth-mixing matrices on")
    causal_tokens: int = option(
        4096, "Tokens to measure cut connections and skipped sublayers on, the slowest part; 0: leave both out"
    )
    batch_size: int = option(8, "Sequences per forward pass")
    seq_len: int | None = option(None, "Tokens per sequence; none: as in training")
    device: str = option("auto", "Device: cpu, cuda, cuda:N, mps or auto")
    json: str = option("", "JSON file to write all measurements to")


@dataclass
class ExploreConfig:
    """Look into a trained model in a browser: type a text, choose a token and see where each site read it from."""

    run: str = option(
        "", "Run folder of `depthmix train`, one of its checkpoints, or a folder of `save_pretrained`", first=True
    )
    against: str = option("", "Second model to show next to the first; may be given as the second word", first=True)
    text: str = option("", "Text to start with; none: a built-in sentence")
    seq_len: int | None = option(None, "Longest text, in tokens; none: the sequence length of the training")
    host: str = option("127.0.0.1", "Address to listen on; any address other than this machine's own lets others in")
    port: int = option(0, "Port to listen on; 0: any free port")
    device: str = option("auto", "Device: cpu, cuda, cuda:N, mps or auto")
