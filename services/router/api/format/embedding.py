"""Embeddings, as OpenAI's API has them: whole only."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from services.router.api.format.base import Formatter, Whole
from services.router.core.emission import Delta, Usage


class EmbeddingFormatter(Formatter):
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        return []

    def end(self, usage: Usage) -> list[dict[str, Any]]:
        return []

    def whole(self, choices: Sequence[Whole], usage: Usage) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": choice.index, "embedding": self._encoded(choice.embedding)}
                for choice in choices
            ],
            "model": self.document.model,
            "usage": {"prompt_tokens": usage[0], "total_tokens": usage[0]},
        }

    def _encoded(self, vector: Sequence[float]) -> list[float] | str:
        if self.document.view.detail.get("encoding_format") == "base64":
            return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
        return list(vector)
