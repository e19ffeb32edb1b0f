"""GLM 4.5 and later: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>."""

from __future__ import annotations

from penstock.text.tools.tagged import TaggedTools

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class Glm45(TaggedTools):
    markers = (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)
    signs = (CALL, KEY)

    def outside(self) -> bool:
        before, marker = self.reader.seek(CALL)
        self.say(before)
        return self.go(self._function) if marker else False

    def _function(self) -> bool:
        place, _ = self.reader.find(KEY, CALL_END)
        if place < 0:
            if self.reader.final:
                self.say(CALL + self.reader.take(len(self.reader.text)))
            return False
        name = self.reader.take(place)
        if not name.strip():
            self.say(CALL + name)
            return self.go(self.outside)
        self.begin_call(name.strip())
        return self.go(self._arguments)

    def _arguments(self) -> bool:
        _, marker = self.reader.seek(KEY, CALL_END)
        if marker == CALL_END:
            self.end_call()
            return self.go(self.outside)
        return self.go(self._key) if marker else False

    def _key(self) -> bool:
        key, found = self._whole(KEY_END, VALUE)
        if found:
            self._name_of = key.strip()
            return self.go(self._value)
        return False

    def _value(self) -> bool:
        value, found = self._whole(VALUE_END, "")
        if found:
            self.argument(self._name_of, value)
            return self.go(self._arguments)
        return False

    def _whole(self, end: str, following: str) -> tuple[str, bool]:
        """What comes before this, which is used up; and what follows it, if that is there."""
        place, _ = self.reader.find(end)
        if place < 0:
            return "", False
        rest = self.reader.text[place + len(end) :].lstrip()
        if following and not rest.startswith(following) and following.startswith(rest) and not self.reader.final:
            return "", False
        text = self.reader.take(place)
        self.reader.take(len(end))
        if following and rest.startswith(following):
            self.reader.skip_blank()
            self.reader.take(len(following))
        return text, True
