"""How the names of a file's tensors differ from those of the layers' specs; no torch."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class FileNames:
    """`renamed`: regular expressions and what replaces them, all applied to each name in this order.

    `unused`: a regular expression of the file's tensors that the model does not need.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    unused: str | None = None

    def in_specs(self, name: str) -> str:
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name

    def is_used(self, name: str) -> bool:
        return self.unused is None or re.search(self.unused, name) is None
