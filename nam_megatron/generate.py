"""The command: python -m nam_megatron.generate PATH --prompt TEXT ...: text from an export or straight from a checkpoint (torch side).

A batch is padded on the left to its longest prompt and decoded together; what a sequence is remembered by lies in caches that are
allocated once, or grow. One prompt is written as it comes, a file of them as JSONL.
"""

import argparse
import codecs
import json
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nam_megatron.errors import OK, Refused, finish, keyless, not_there, raise_if
from nam_megatron.hf import KERNELS
from nam_megatron.parser import Parser
from nam_megatron.words.argtypes import between, count, whole
from nam_megatron.words.regular import closed, irregular, kind

if TYPE_CHECKING:
    import torch

EXAMPLES = """
examples:
  python -m nam_megatron.generate out/hf --prompt '#include <vector>' --new 200
  python -m nam_megatron.generate runs/ckpt --prompt 'int main' --temperature 0.8 --top-p 0.95 --seed 1
  python -m nam_megatron.generate out/hf --file prompts.jsonl --batch 64 --device cuda --kernels nam_megatron > out.jsonl

A line of the file is {"prompt": "text"} or {"tokens": [1, 2, 3]}; a line of the output has the same key, "text" or "new", and "ended",
which is null where no tokenizer says which token ends a document.
Exit code: 0 done, 2 refused.
"""


@dataclass(frozen=True)
class Options:
    """temperature 0 is greedy. top_k 0 and top_p 1: all words. ends: the tokens that end a sequence."""

    new: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ends: Collection[int] = ()
    grow: bool = False


def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    options: Options,
    cache: Any = None,
    draw: "torch.Generator | None" = None,
) -> Iterator[list[int | None]]:
    """The next token of every sequence, until all have ended; None for one that has.

    cache: an empty NamCache to fill; one is made otherwise, of the size that is needed, unless it shall grow. draw: what words are drawn
    by, which goes on from batch to batch; None: a new one of the seed.

    Raises:
        Refused: no tokens, tokens beyond the vocabulary, a length that the model was not trained on, or logits that are no numbers.
    """
    import torch

    from nam_megatron.hf.model.modeling_nam import NamCache

    _check(model.config, prompts, options.new)
    device, longest = model.device, max(map(len, prompts))
    cache = cache or NamCache(None if options.grow else longest + options.new)
    padded = [[0] * (longest - len(p)) + list(p) for p in prompts]
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    tokens = torch.tensor(padded, device=device)
    draw = draw or drawing(options, device)
    alive = [True] * len(prompts)
    for _ in range(options.new):
        with torch.inference_mode():
            logits = model(tokens, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        if logits.isnan().any():  # greedy, all words would be the first one
            raise Refused("the model gives no numbers", hint="are its weights damaged? `nam hf check`")
        chosen = pick(logits, options, draw)
        said = [token if there else None for token, there in zip(chosen.tolist(), alive, strict=True)]
        yield said
        alive = [there and token not in options.ends for token, there in zip(said, alive, strict=True)]
        if not any(alive):
            return
        tokens, mask = chosen[:, None], torch.nn.functional.pad(mask, (0, 1), value=1)


def drawing(options: Options, device: Any) -> "torch.Generator | None":
    """What words are drawn by; None: by chance."""
    import torch

    return None if options.seed is None else torch.Generator(device).manual_seed(options.seed)


def pick(logits: "torch.Tensor", options: Options, draw: "torch.Generator | None") -> "torch.Tensor":
    """A token for each row of logits [b, vocabulary]."""
    import torch

    if options.temperature == 0:
        return logits.argmax(-1)
    logits = logits / options.temperature
    if options.top_k:
        least = logits.topk(min(options.top_k, logits.size(-1)), -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if options.top_p < 1:
        ordered, words = logits.sort(-1, descending=True)
        shares = ordered.softmax(-1)
        # The first word that reaches top_p stays.
        ordered = ordered.masked_fill(shares.cumsum(-1) - shares >= options.top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter(-1, words, ordered)
    return torch.multinomial(logits.softmax(-1), 1, generator=draw).squeeze(-1)


def _check(config: Any, prompts: Sequence[Sequence[int]], new: int) -> None:
    if not prompts or not all(prompts):
        raise Refused("an empty prompt", hint="give at least one token")
    for token in (max(map(max, prompts)), min(map(min, prompts))):
        if not 0 <= token < config.vocab_size:
            raise Refused(f"token {token} of a vocabulary of {config.vocab_size}", hint="is it the right tokenizer?")
    most, longest = config.max_position_embeddings, max(map(len, prompts))
    if longest + new > most:
        said = f"{longest} tokens and {new} new ones, and the model was trained on {most}"
        raise Refused(said, hint=f"`--new {most - longest}` or less" if longest < most else "a shorter prompt")


# The command ---------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="python -m nam_megatron.generate",
        description="Text from an export or a checkpoint.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("path", type=Path, metavar="PATH", help="an export's folder, or a checkpoint's")
    which = top.add_mutually_exclusive_group(required=True)
    which.add_argument("--prompt", help="a text to go on with")
    which.add_argument("--file", type=Path, metavar="JSONL", help="prompts, one a line")
    top.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="where neither the export nor the run's dataset has one"
    )
    top.add_argument("--new", type=count, default=128, help="tokens to add at most (default: 128)")
    top.add_argument("--batch", type=count, default=16, help="prompts decoded together (default: 16)")
    top.add_argument("--temperature", type=between(1e-3, 1e6, beside=0), default=0.0, help="0 is greedy (default)")
    top.add_argument("--top-k", type=whole, default=0, help="of the best words alone; 0: all")
    top.add_argument("--top-p", type=between(1e-9, 1), default=1.0, help="of the fewest words with this probability")
    top.add_argument("--seed", type=whole, help="the same words every time")
    top.add_argument("--endless", action="store_true", help="go on behind the end of a document")
    top.add_argument("--grow", action="store_true", help="caches grow with the text instead of being allocated once")
    top.add_argument("--device", default="cpu")
    top.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    top.add_argument(
        "--kernels", choices=KERNELS, default="torch", help="what computes: plain torch (default), or ours, on a GPU"
    )
    return top


def main(argv: list[str] | None = None) -> int:
    words = parser().parse_args(argv)
    return keyless(lambda: _run(words))


def _run(words: argparse.Namespace) -> int:
    from nam_megatron.hf.opened import DTYPES, absent, open_model

    if not words.temperature and (words.top_k or words.top_p < 1):
        said = f"`--{'top-k' if words.top_k else 'top-p'}` of greedy words, which are not drawn"
        raise Refused(said, hint="give a temperature too: `--temperature 1`")
    if words.file is None and not _text(words.prompt):
        raise Refused("`--prompt` is no text of Unicode characters", hint="UTF-8 is read")
    if not words.path.exists():
        raise Refused(not_there(words.path))
    raise_if(absent(words.device, words.kernels))
    asked = [{"prompt": words.prompt}] if words.file is None else list(_lines(words.file))
    if not asked:
        raise Refused(f"`{words.file}` holds no prompts", hint="one a line")
    tokenizer, ends = _tokenizer(words, needed=any("prompt" in line for line in asked))
    if tokenizer is not None:
        from nam_megatron.data.tokenizer import encode
    model = open_model(words.path, DTYPES[words.dtype], words.device, words.kernels)
    if tokenizer is not None and tokenizer.get_vocab_size() > model.config.vocab_size:
        said = f"the tokenizer has {tokenizer.get_vocab_size()} entries, and the model {model.config.vocab_size}"
        raise Refused(said, hint="give the one that the data was built with")
    ends = () if words.endless else ends
    options = Options(words.new, words.temperature, words.top_k, words.top_p, words.seed, ends, words.grow)

    def tokens_of(line: dict[str, Any]) -> list[int]:
        # Without what a tokenizer would put around a text, as in the data.
        return line["tokens"] if "tokens" in line else encode(tokenizer, line["prompt"])

    prompts = [tokens_of(line) for line in asked]
    _check(model.config, prompts, words.new)  # of all batches, before anything is written
    if words.file is None:
        _stream(model, prompts[0], options, tokenizer)
        return OK
    draw = drawing(options, model.device)
    for first in range(0, len(asked), words.batch):
        these = slice(first, first + words.batch)
        found = _all(model, prompts[these], options, draw)
        for line, prompt, new in zip(asked[these], prompts[these], found, strict=True):
            if "tokens" in line:
                made: dict[str, Any] = {"new": new}
            else:
                made = {"text": _behind(tokenizer, prompt, [t for t in new if t not in ends])}
            made["ended"] = bool(new) and new[-1] in ends if words.endless or ends else None
            print(json.dumps({**line, **made}, ensure_ascii=False), flush=True)
    return OK


def _all(
    model: Any, prompts: Sequence[Sequence[int]], options: Options, draw: "torch.Generator | None"
) -> list[list[int]]:
    """All new tokens of a batch; says on stderr what it took."""
    from nam_megatron.hf.model.modeling_nam import NamCache

    cache = NamCache(None if options.grow else max(map(len, prompts)) + options.new)
    found: list[list[int]] = [[] for _ in prompts]
    begin = time.monotonic()
    for said in decode(model, prompts, options, cache, draw):
        for new, token in zip(found, said, strict=True):
            if token is not None:
                new.append(token)
    seconds, count = time.monotonic() - begin, sum(map(len, found))
    took = f"{len(prompts)} sequences, {count:,} new tokens, {count / seconds:,.1f} tokens/s"
    print(f"> {took}, cache {cache.nbytes / 2**30:.3f} GiB", file=sys.stderr)
    return found


def _stream(model: Any, prompt: Sequence[int], options: Options, tokenizer: Any) -> None:
    """Write a text as it comes: whole characters, which byte-level tokens may part."""
    shown, new = "", []
    sys.stdout.write(tokenizer.decode(list(prompt)))
    for (token,) in decode(model, [prompt], options):
        if token in options.ends:
            break
        new.append(token)
        text = _behind(tokenizer, prompt, new)
        if not text.endswith("\ufffd"):
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    sys.stdout.write(_behind(tokenizer, prompt, new)[len(shown) :] + "\n")


def _behind(tokenizer: Any, prompt: Sequence[int], new: Sequence[int | None]) -> str:
    """The text of new tokens. By themselves some tokenizers would take the blank before their first word for that of a text's beginning."""
    return tokenizer.decode([*prompt, *new])[len(tokenizer.decode(list(prompt))) :]


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    if kind(path) == "a device":  # which has no end; a pipe has one
        raise_if(irregular((path,)))
    try:
        texts = codecs.decode(path.read_bytes(), "utf-8").split("\n")
    except OSError as err:
        raise Refused(closed(err)) from None
    except ValueError as err:
        raise Refused(f"`{path}` cannot be read: {err}") from None
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as err:
            raise Refused(f"line {number} of `{path}` is no JSON: {err}") from None
        if not isinstance(line, dict) or not line.keys() & {"prompt", "tokens"}:
            raise Refused(f"line {number} of `{path}` has neither a `prompt` nor `tokens`")
        if line.keys() >= {"prompt", "tokens"}:
            raise Refused(f"line {number} of `{path}` has a `prompt` and `tokens`", hint="give one of both")
        if ours := line.keys() & {"ended", "new" if "tokens" in line else "text"}:
            said = f"line {number} of `{path}` has `{min(ours)}`, which is written here"
            raise Refused(said, hint="give it another name")
        if "tokens" in line:
            ids = line["tokens"]
            if not (isinstance(ids, list) and ids and all(type(t) is int for t in ids)):
                raise Refused(f"line {number} of `{path}`: `tokens` is no list of integers")
        elif not _text(line["prompt"]):
            raise Refused(f"line {number} of `{path}`: `prompt` is no text of Unicode characters")
        yield line


def _text(prompt: Any) -> bool:
    """Whether a tokenizer takes it: no half of a surrogate pair, as which Python also has bytes that are no UTF-8."""
    return isinstance(prompt, str) and not any("\ud800" <= c <= "\udfff" for c in prompt)


def _tokenizer(words: argparse.Namespace, needed: bool) -> tuple[Any, Collection[int]]:
    """And the tokens that end a text."""
    from nam_megatron.data import tokenizer
    from nam_megatron.hf.opened import another_tokenizer, tokenizer_of

    try:
        folder = words.tokenizer or tokenizer_of(words.path)
    except Refused:
        if needed:
            raise
        return None, ()
    made = tokenizer.load(folder)
    raise_if(another_tokenizer(words.path, folder))
    return made, tokenizer.ends(folder, made)


if __name__ == "__main__":
    finish(main)
