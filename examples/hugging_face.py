"""A Hugging Face model: a Llama retrofitted with a mixer, fine-tuned with Trainer, saved, loaded, and asked to go on.

    python examples/hugging_face.py            # attnres
    python examples/hugging_face.py dca        # any rule that begins as the plain residual

The Llama is small and its weights are random, so that nothing is fetched: it is built and saved first, as if it were somebody's.
Needs transformers and accelerate: pip install '.[hf]' accelerate, in a clone of depthmix
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
    """Trainer, which decays no small vector of the mixer."""


def somebodys_model(folder: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCAB, **shape, bos_token_id=None, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)


def main(mixer: str = "attnres", steps: int = 60, **options: object) -> list[float]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        somebodys_model(place / "plain")

        model = AutoModelForCausalLM.from_pretrained(place / "plain")
        depthmix.retrofit(model, mixer, **options)  # the same logits, printed by how much they changed

        arguments = TrainingArguments(
            output_dir=str(place / "trainer"),
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
        trainer.remove_callback(PrinterCallback)  # a line for every step
        trainer.train()

        model.save_pretrained(place / "tuned")
        again = AutoModelForCausalLM.from_pretrained(place / "tuned").to(model.device).eval()
        prompt = torch.tensor([[3, 4, 5, 6], [3, 5, 7, 9]], device=again.device)
        mask = torch.ones_like(prompt)
        made = again.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)

    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"{mixer}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    for row in made.tolist():
        print(f"after {row[:4]}: {row[4:]}")
    return losses


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except (UserError, depthmix.OptionError) as error:  # a rule that a trained model cannot be given, or none
        sys.exit(str(error))
