"""Refuse attributes of Lark rules that llguidance parses but that would have no effect here."""

import re

from nanovllm.errors import RequestError

# A rule's name with its attributes: `name[temperature=0.5, stop="]"]:`
STRING, REGEX = r'"(?:\\.|[^"\\\n])*"', r"/(?:\\.|[^/\\\n])+/"
HEAD = re.compile(rf'^[ \t]*[!?]*[ \t]*\w+[ \t]*\[((?:{STRING}|{REGEX}|[^\]"/\n])*)\]\s*:', re.MULTILINE)
LITERAL = re.compile(f"{STRING}|{REGEX}")
WITHOUT_EFFECT = {
    "temperature": "a request has one temperature; set it in the sampling parameters",
    "capture": "the text that matches a rule is not returned; extract it from the completion",
    "stop_capture": "the text that matches a rule is not returned; extract it from the completion",
}


def check_lark(text: str) -> None:
    """Raise a RequestError that names the first rule attribute without effect."""
    for head in HEAD.finditer(text):
        for name in re.findall(r"\w+", LITERAL.sub("", head[1])):
            if name in WITHOUT_EFFECT:
                raise RequestError(
                    f"grammar: the attribute {name!r} of a rule is not supported: {WITHOUT_EFFECT[name]}"
                )
