"""A tiny model whose tokenizer behaves as that of Qwen3-Embedding: its end token is its padding token."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def qwen_like_tokenizer(*, appends: bool = True, begins: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level, NFC, punctuation and newline one token; `appends`: <|endoftext|> after each text, as published."""
    vocab = {token: n for n, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [(".", "Ċ"), ("?", "Ċ"), ("!", "Ċ"), ("Ċ", "Ċ"), ("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    split: Any = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    bytes_only: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (END, START, STOP)])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    after = [END] * appends
    before = [START] * begins
    if after or before:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in (*before, *after)],
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=STOP, pad_token=END)


def qwen_like(**options: bool) -> tuple[Any, PreTrainedTokenizerFast]:
    """Two random layers in float32 and the tokenizer; the model's end-of-sequence token is <|endoftext|>."""
    tokenizer = qwen_like_tokenizer(**options)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids(END), pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval(), tokenizer
