"""What a server that plays says to a completion request, spoilt where its faults say so."""

from __future__ import annotations

import itertools
import time
from typing import Any

from tests.unit.engines.vllm.misbehaving.player import Player, text_of

__all__ = ["answer_at_once", "said"]


def answer_at_once(player: Player, body: dict[str, Any]) -> dict[str, Any]:
    """The one choice of an answer that is not streamed."""
    prompt = body["prompt"]
    choice = said(player, player.greedy(prompt, body["max_tokens"]), body)
    if player.scoring.startswith("echo") and body.get("echo"):
        return {**choice, "logprobs": _echo(player, body)}
    if player.scoring == "prompt_logprobs" and (asked := body.get("prompt_logprobs")) is not None:
        choice["prompt_logprobs"] = _spoil(player, _prompt_logprobs(player, prompt, asked))
    if body.get("logprobs") is not None:
        log_prob = -1.0
        if player.faults.forgets_prefixes and body["cache_salt"] in player.salts:
            log_prob = -9.0
        player.salts.add(body.get("cache_salt", ""))
        choice["logprobs"] = {"token_logprobs": [log_prob]}
    return choice


def said(player: Player, tokens: list[int], body: dict[str, Any]) -> dict[str, Any]:
    """The choice that says these tokens."""
    choice: dict[str, Any] = {"index": 0, "text": "".join(map(text_of, tokens))}
    return {**choice, "token_ids": tokens} if player.speaks_ids and body.get("return_token_ids") else choice


def _prompt_logprobs(player: Player, prompt: list[int], asked: int) -> list[Any]:
    positions: list[Any] = [None]
    together = player.faults.mixes_up_batches and _waits_for_company(player)
    for before, actual in itertools.pairwise(prompt):
        found = player.log_probs(before + 1000 * together, actual)
        ranked = sorted(found, key=lambda token: -found[token])
        named = {actual: ranked.index(actual) + 1} | {t: ranked.index(t) + 1 for t in ranked[:asked]}
        positions.append(
            {str(t): {"logprob": found[t], "rank": rank, "decoded_token": "x"} for t, rank in named.items()}
        )
    return positions


def _waits_for_company(player: Player) -> bool:
    time.sleep(0.05)
    return player.running > 1


def _spoil(player: Player, positions: list[Any]) -> list[Any] | None:
    faults = player.faults
    with player.lock:
        if faults.strikes("short_scores"):
            del positions[-1]
        if faults.strikes("other_tokens"):
            positions[-1] = {"99999": {"logprob": -1.0, "rank": 1}}
        if faults.strikes("nan_logprobs"):
            for entry in positions[-1].values():
                entry["logprob"] = None
        return None if faults.strikes("no_logprobs") else positions


def _echo(player: Player, body: dict[str, Any]) -> dict[str, Any]:
    prompt = body["prompt"]
    by_id = player.scoring == "echo" and body.get("return_tokens_as_token_ids")

    def word(token: int) -> str:
        return f"token_id:{token}" if by_id else text_of(token)

    read = [*prompt, *player.greedy(prompt, 1)]
    own: list[float | None] = [None]
    top: list[dict[str, float] | None] = [None]
    for before, actual in itertools.pairwise(read):
        found = player.log_probs(before, actual)
        ranked = sorted(found, key=lambda token: -found[token])[: body["logprobs"]]
        own.append(found[actual])
        top.append({word(token): found[token] for token in ranked})
    words = [word(token) for token in read]
    with player.lock:
        if player.faults.strikes("short_scores"):
            words, own, top = words[:-3], own[:-3], top[:-3]
    return {"tokens": words, "token_logprobs": own, "top_logprobs": top}
