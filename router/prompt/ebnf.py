"""Grammars in EBNF (`root ::= ...`) to rules of a `Sheet`.

Understood: literals in double or single quotes, character sets, `.`, rules by name, `|`, groups,
`*`, `+`, `?`, `{n}`, `{n,}`, `{n,m}` and comments from `#` on. A grammar without recursion becomes
one terminal, which is matched as a whole; one with recursion is read character by character. Either
way no word is ever taken greedily at the cost of what may follow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from common.errors import InvalidRequest
from router.prompt.endless import endings
from router.prompt.sheet import Sheet, literal

MOST_TIMES = 10_000  # of a repetition
DEEPEST = 200  # groups inside groups

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)|(?P<is>::=)|(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<set>\[(?:\\.|[^\]\\])*\])
    |(?P<times>\{\s*\d{1,9}\s*(?:,\s*(?:\d{1,9}\s*)?)?\})|(?P<mark>[|()*+?.])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_TIMES = {("mark", "*"), ("mark", "+"), ("mark", "?")}
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}

Token = tuple[str, str]  # kind and text
Rules = dict[str, list[Token]]
Part = str | tuple[str, int]  # a rule, or a group of one by its place
Ways = dict[Part, list[list[Part]]]  # what each part needs, alternative by alternative


def write_grammar(sheet: Sheet, text: str, param: str) -> str:
    """Add the grammar's rules; gives back its root.

    Raises:
        InvalidRequest: it cannot be read, names a rule that is missing, or has no `root`.
    """
    rules = _split(_tokens(text, param), param)
    used = {name: {t for kind, t in body if kind == "name"} for name, body in rules.items()}
    for name, others in used.items():
        for other in sorted(others - rules.keys()):
            raise _fault(param, f"the rule `{name[:60]}` names `{other[:60]}`, which is missing")
    if "root" not in rules:
        raise _fault(param, "there is no rule `root`")
    is_whole = not _is_recursive(used)
    names = {name: f"{'T' if is_whole else 'g'}{i}" for i, name in enumerate(rules)}
    ways = Ways()
    for name in sorted(_reached(used)):
        writer = _Writer(rules[name], names, param, is_whole=is_whole)
        sheet.add(names[name], writer.whole(name, ways))
    found = endings(ways)
    for name in sorted(_reached(used) - found):
        raise _fault(param, f"what the rule `{name[:60]}` stands for never ends")
    return names["root"]


def _tokens(text: str, param: str) -> list[Token]:
    found, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _fault(param, f"line {text.count(chr(10), 0, at) + 1} has {text[at : at + 20]!r}")
        if match.lastgroup != "space":
            found.append((str(match.lastgroup), match[0]))
        at = match.end()
    return found


def _split(tokens: Sequence[Token], param: str) -> Rules:
    """Rules by name, each with its tokens."""
    rules: Rules = {}
    body: list[Token] | None = None
    for at, (kind, text) in enumerate(tokens):
        after = tokens[at + 1][0] if at + 1 < len(tokens) else ""
        if kind == "name" and after == "is":
            if text in rules:
                raise _fault(param, f"the rule `{text[:60]}` is defined twice")
            body = rules[text] = []
        elif kind == "is":
            if at == 0 or tokens[at - 1][0] != "name":
                raise _fault(param, "`::=` needs a name before it")
        elif body is None:
            raise _fault(param, f"it begins with {text[:20]!r} instead of `root ::=`")
        else:
            body.append((kind, text))
    return rules


def _reached(used: Mapping[str, set[str]]) -> set[str]:
    found, left = {"root"}, ["root"]
    while left:
        fresh = used[left.pop()] - found
        found |= fresh
        left += fresh
    return found


def _is_recursive(used: Mapping[str, set[str]]) -> bool:
    """Whether a rule that is needed leads back to itself."""
    left = {name: set(used[name]) for name in _reached(used)}
    while ready := [name for name, others in left.items() if not others]:
        for name in ready:
            del left[name]
        for others in left.values():
            others -= set(ready)
    return bool(left)


class _Writer:
    """One rule's tokens on their way into the sheet's form."""

    def __init__(
        self, tokens: Sequence[Token], names: Mapping[str, str], param: str, *, is_whole: bool
    ) -> None:
        """`is_whole`: part of a terminal; otherwise every character stands for itself."""
        self.tokens, self.names, self.param, self.is_whole = tokens, names, param, is_whole
        self.at = self.depth = 0
        self._name, self._ways = "", Ways()
        self._needs: list[Part] = []  # of the sequence that is being read

    def whole(self, name: str, ways: Ways) -> str:
        """The rule's text; `ways` learns what it needs."""
        self._name, self._ways = name, ways
        text = self._either(name)
        if self.at < len(self.tokens):
            raise _fault(self.param, f"{self.tokens[self.at][1][:20]!r} stands out of place")
        return text

    def _peek(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("", "")

    def _either(self, part: Part) -> str:
        """Alternatives of a part; an empty one makes the others optional."""
        parts = [self._sequence(part)]
        while self._peek() == ("mark", "|"):
            self.at += 1
            parts.append(self._sequence(part))
        full = [part for part in dict.fromkeys(parts) if part]
        text = f"({' | '.join(full)})" if full else ""
        return f"{text}?" if full and "" in parts else text

    def _sequence(self, part: Part) -> str:
        outside, self._needs = self._needs, []
        parts = []
        while self._peek()[1] not in ("|", ")", "") or self._peek()[0] in ("text", "set"):
            needed = len(self._needs)
            parts.append(self._times(self._atom(), needed))
        self._ways.setdefault(part, []).append(self._needs)
        self._needs = outside
        return " ".join(part for part in parts if part)

    def _atom(self) -> str:
        kind, text = self._peek()
        self.at += 1
        if kind == "name":
            self._needs.append(text)
            return self.names[text]
        if kind == "text":
            return self._literal(unescape(text[1:-1], self.param))
        if kind == "set":
            return f"/{_set(text[1:-1], self.param)}/"
        if text == ".":
            return "/(?s:.)/"
        if text == "(":
            return self._group()
        raise _fault(self.param, f"{text[:20]!r} stands out of place")

    def _group(self) -> str:
        self.depth += 1
        if self.depth > DEEPEST:
            raise _fault(self.param, "groups are nested too deeply")
        group = (self._name, self.at)
        text = self._either(group)
        self._needs.append(group)
        if self._peek() != ("mark", ")"):
            raise _fault(self.param, "a group is not closed")
        self.at += 1
        self.depth -= 1
        return f"({text})" if text else ""

    def _literal(self, text: str) -> str:
        if not text:
            return ""
        if self.is_whole:
            return literal(text)
        return f"({' '.join(map(literal, text))})"

    def _times(self, atom: str, needed: int) -> str:
        """An atom with its repetition; one that may be left out asks for nothing of its own."""
        kind, text = self._peek()
        if kind != "times" and (kind, text) not in _TIMES:
            return atom
        self.at += 1
        if not atom:
            return ""
        if kind != "times":
            if text != "+":
                del self._needs[needed:]
            return f"({atom}){text}"
        low, comma, high = re.sub(r"\s", "", text[1:-1]).partition(",")
        if max(int(low), int(high or 0)) > MOST_TIMES or (high and int(high) < int(low)):
            raise _fault(self.param, f"a repetition of {text} is not possible")
        if not int(low):
            del self._needs[needed:]
        return f"({atom}){{{low}{comma}{high}}}"


def unescape(text: str, param: str) -> str:
    """The characters a literal stands for.

    Raises:
        InvalidRequest: an escape is unknown, or stands for half a surrogate pair.
    """
    return _ESCAPE.sub(lambda match: _escaped(match, param), text)


def _escaped(match: re.Match[str], param: str) -> str:
    code = match[1] or match[2] or match[3]
    if code is None:
        if match[4].isalnum() and match[4] not in _LETTERS:
            raise _fault(param, f"the escape `{match[0]}` is not known")
        return _LETTERS.get(match[4], match[4])
    point = int(code, 16)
    if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
        raise _fault(param, f"the escape `{match[0]}` is no character")
    return chr(point)


def _set(text: str, param: str) -> str:
    """A character set as an expression that has no character of the client's in it."""
    negated = text.startswith("^")
    points = [
        (_escaped(m, param), False) if m[0].startswith("\\") else (m[0], m[0] == "-")
        for m in re.finditer(rf"{_ESCAPE.pattern}|[^\\]", text[negated:], re.DOTALL)
    ]
    ranges, at = [], 0
    while at < len(points):
        low = high = points[at][0]
        if at + 2 < len(points) and points[at + 1][1]:
            high, at = points[at + 2][0], at + 2
        if high < low:
            raise _fault(param, f"the range {low}-{high} runs backwards")
        ranges.append(f"\\x{{{ord(low):x}}}-\\x{{{ord(high):x}}}")
        at += 1
    if not ranges:
        raise _fault(param, "a character set is empty")
    return f"[{'^' if negated else ''}{''.join(ranges)}]"


def _fault(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"`{param}` is not a grammar: {what}", param=param)
