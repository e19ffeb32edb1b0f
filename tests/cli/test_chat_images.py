"""Images in the terminal."""

from base64 import b64encode

from penstock.cli.chat import Chat, Piece, _command


class Server:
    def __init__(self):
        self.asked = []

    def stream(self, body):
        self.asked.append(body)
        yield Piece("A red circle.", ends=True)


def test_a_file_goes_with_the_next_message_alone(tmp_path):
    picture, server = tmp_path / "picture.png", Server()
    picture.write_bytes(b"png")
    chat = Chat(server, "m", None, {})
    assert "sent with the next" in _command(chat, f"/image {picture}")
    assert "sent with the next" in _command(chat, "/image https://example.org/a.png")
    assert "cannot be read" in _command(chat, "/image /nowhere/at/all.png")
    for text in ("What is it?", "And now?"):
        list(chat.ask(text))
    first, second = (body["messages"] for body in server.asked)
    urls = [part["image_url"]["url"] for part in first[0]["content"][:-1]]
    assert urls == [f"data:image/png;base64,{b64encode(b'png').decode()}", "https://example.org/a.png"]
    assert first[0]["content"][-1] == {"type": "text", "text": "What is it?"}
    assert second[0] == first[0], "it stays in the conversation"
    assert second[-1] == {"role": "user", "content": "And now?"}
    _command(chat, f"/image {picture}")
    _command(chat, "/reset")
    list(chat.ask("Hello"))
    assert server.asked[-1]["messages"] == [{"role": "user", "content": "Hello"}]
