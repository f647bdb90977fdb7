"""What llguidance reads in a Lark grammar and would leave without effect here: it is refused by its name."""

import re

from nanovllm.errors import RequestError

# A rule's name, and the attributes behind it: `name[temperature=0.5, stop="]"]:`
STRING, REGEX = r'"(?:\\.|[^"\\\n])*"', r"/(?:\\.|[^/\\\n])+/"
HEAD = re.compile(rf'^[ \t]*[!?]*[ \t]*\w+[ \t]*\[((?:{STRING}|{REGEX}|[^\]"/\n])*)\]\s*:', re.MULTILINE)
LITERAL = re.compile(f"{STRING}|{REGEX}")
WITHOUT_EFFECT = {
    "temperature": "a request has one temperature; set it there",
    "capture": "the text of a rule is not told apart; read it out of the answer",
    "stop_capture": "the text of a rule is not told apart; read it out of the answer",
}


def check_lark(text: str) -> None:
    for head in HEAD.finditer(text):
        for name in re.findall(r"\w+", LITERAL.sub("", head[1])):
            if name in WITHOUT_EFFECT:
                raise RequestError(f"grammar: the attribute {name!r} of a rule cannot be kept: {WITHOUT_EFFECT[name]}")
