"""How the names of a file's tensors differ from those of the layers' specs; no torch."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class FileNames:
    """`renamed`: regular expressions and what replaces them, all applied to each name in this order."""

    renamed: tuple[tuple[str, str], ...] = ()

    def in_specs(self, name: str) -> str:
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name
