"""Make a tokenizer of 2,000 words and some texts, so that torchtitan's debug model trains offline.

    python examples/torchtitan/assets.py FOLDER

prints what it wrote.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def main(folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``texts/texts.json``."""
    texts = [" ".join(f"word{i * j % 97} and {i + j}" for i in range(400)) for j in range(256)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    kind = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=list(special.values()), initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, kind)
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "texts" / "texts.json").write_text("\n".join(lines))
    print(f"wrote a tokenizer and {len(texts)} texts to {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
