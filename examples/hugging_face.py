"""A Hugging Face model: a Llama retrofitted with a mixer, fine-tuned with Trainer, saved, loaded, and used to generate.

    python examples/hugging_face.py            # attnres
    python examples/hugging_face.py dca        # any rule that begins as the plain residual

The Llama is small and has random weights, so nothing is downloaded. The script builds and saves it first, as a stand-in for a
pretrained model. It needs transformers and accelerate: pip install '.[hf]' accelerate, in a clone of depthmix.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import depthmix
from depthmix.errors import UserError
from depthmix.hf import PaperDecay

VOCAB, LENGTH = 32, 16


class Counting(torch.utils.data.Dataset):
    """Sequences that count up by one or by two, from any token on."""

    def __len__(self) -> int:
        return 2 * VOCAB

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = (i // 2 + (1 + i % 2) * torch.arange(LENGTH)) % VOCAB
        return {"input_ids": ids, "labels": ids}


class MyTrainer(PaperDecay, Trainer):
    """A Trainer that does not decay the mixer's small vectors."""


def save_plain_model(folder: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCAB, **shape, bos_token_id=None, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)


def main(mixer: str = "attnres", steps: int = 60, **options: object) -> list[float]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_plain_model(folder / "plain")

        model = AutoModelForCausalLM.from_pretrained(folder / "plain")
        # Keeps the logits, and prints by how much rounding changed them.
        depthmix.retrofit(model, mixer, **options)

        arguments = TrainingArguments(
            output_dir=str(folder / "trainer"),
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            weight_decay=0.1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = MyTrainer(model=model, args=arguments, train_dataset=Counting())
        # It would print a line for every step.
        trainer.remove_callback(PrinterCallback)
        trainer.train()

        model.save_pretrained(folder / "tuned")
        loaded = AutoModelForCausalLM.from_pretrained(folder / "tuned").to(model.device).eval()
        prompt = torch.tensor([[3, 4, 5, 6], [3, 5, 7, 9]], device=loaded.device)
        mask = torch.ones_like(prompt)
        generated = loaded.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)

    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"{mixer}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    for row in generated.tolist():
        print(f"after {row[:4]}: {row[4:]}")
    return losses


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    # The rule is unknown, or a pretrained model cannot have it.
    except (UserError, depthmix.OptionError) as error:
        sys.exit(str(error))
