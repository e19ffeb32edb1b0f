"""Images, videos and URLs that are made to break who takes them."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from base64 import b64encode
from collections.abc import Iterator

import numpy as np
from PIL import Image

NOT_ONE = "is not an image that can be read"
BROKEN = "is broken"


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def encoded(kind: str, width: int = 64, height: int = 48, **options: object) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


def png(width: int, height: int, rows: bytes = b"", *more: tuple[bytes, bytes], colour: int = 2) -> bytes:
    """With whatever it says of itself."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)), *more]
    chunks += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    packed = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def long_gif(frames: int) -> bytes:
    """Of one pixel; counting its frames takes long."""
    data = animated("GIF")
    start = data.index(b"\x21\xf9")
    second = data.index(b"\x21\xf9", start + 1)
    return data[:start] + data[start:second] * frames + b";"


def webp(width: int, height: int) -> bytes:
    """Of a canvas of that size, and nothing on it."""
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunk = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + sizes
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def bmp(width: int, height: int, bits: int = 24) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head


def video(
    frames: int = 8, width: int = 64, height: int = 48, codec: str = "mpeg4", kind: str = "mp4", rate: int = 4
) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            pixels = np.full((height, width, 3), 30 * number % 256, dtype=np.uint8)
            pixels[: height // 2] = 255
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()


def sound() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 8000, 0, "NONE", ""))
        out.writeframes(b"\0" * 1600)
    return file.getvalue()


def files() -> Iterator[tuple[str, str, str, str]]:
    """(name, "image_url" or "video_url", URL, what is said of it)."""
    good, jpeg = encoded("PNG"), encoded("JPEG")
    zeros = b"\0" * (1 << 20)
    bomb = zlib.compress(zeros * 64)
    images: dict[str, tuple[bytes, str]] = {
        "empty": (b"", "is empty"),
        "text": (b"hello " * 20, NOT_ONE),
        "html": (b"<html><img src=http://127.0.0.1/></html>", NOT_ONE),
        "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", NOT_ONE),
        "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n", NOT_ONE),
        "pdf": (b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\n", NOT_ONE),
        "tiff": (encoded("TIFF"), NOT_ONE),
        "ico": (encoded("ICO", 16, 16), NOT_ONE),
        "ppm": (encoded("PPM"), NOT_ONE),
        "pickle": (b"\x80\x04\x95\x1a\0\0\0\0\0\0\0\x8c\x02os\x94\x8c\x06system\x94\x93\x94.", NOT_ONE),
        "elf": (b"\x7fELF" + b"\0" * 60, NOT_ONE),
        "zip": (b"PK\x03\x04" + b"\0" * 60, NOT_ONE),
        "gzip": (zlib.compress(good), NOT_ONE),
        "png signature": (good[:8], "is"),
        "png header": (good[:33], NOT_ONE),
        "png cut": (good[: len(good) // 2], BROKEN),
        "png checksum": (good[:45] + bytes([good[45] ^ 1]) + good[46:], BROKEN),
        "png spoiled": (good[:60] + bytes(40) + good[100:], BROKEN),
        "png bomb": (png(40000, 40000, zeros * 8), "40000 x 40000 pixels, at most"),
        "png larger bomb": (png(2**31 - 1, 2**31 - 1), "pixels, at most"),
        "png of no width": (png(0, 10), "is"),
        "png too narrow": (png(1, 4000, b"\0\0\0\0" * 4000), "at most 200 times"),
        "png lacks rows": (png(1000, 1000, b"\0" * 100), BROKEN),
        "png text bomb": (png(8, 8, b"\0" * 200, (b"zTXt", b"a\0\0" + bomb)), BROKEN),
        "png profile bomb": (png(8, 8, b"\0" * 20, (b"iCCP", b"a\0\0" + bomb)), BROKEN),
        "jpeg cut": (jpeg[: len(jpeg) // 2], BROKEN),
        "jpeg header": (jpeg[:20], "is"),
        "jpeg of other size": (jpeg.replace(b"\x00\x30\x00\x40", b"\xff\xff\xff\xff", 1), "65535 x 65535"),
        "gif animated": (animated("GIF"), "is animated"),
        "webp animated": (animated("WEBP"), "is animated"),
        "png animated": (animated("PNG"), "is animated"),
        "gif of many frames": (long_gif(20_000), "is animated"),
        "avif": (b"\0\0\0\x1cftypavif" + bytes(100), NOT_ONE),
        "heic": (b"\0\0\0\x1cftypheic" + bytes(100), NOT_ONE),
        "jpeg 2000": (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(100), NOT_ONE),
        "psd": (b"8BPS\0\1" + bytes(100), NOT_ONE),
        "fits": (b"SIMPLE  =                    T" + b" " * 2850, NOT_ONE),
        "icns": (b"icns" + bytes(100), NOT_ONE),
        "xbm": (b"#define im_width 99999\n#define im_height 99999\nstatic char im_bits[] = {0};", NOT_ONE),
        "windows metafile": (b"\xd7\xcd\xc6\x9a" + bytes(100), NOT_ONE),
        "webp of a huge canvas": (webp(1 << 24, 1 << 24), "is"),
        "gif cut": (encoded("GIF")[:80], NOT_ONE),
        "gif huge": (b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\2", "65535 x 65535"),
        "webp cut": (encoded("WEBP")[:60], "is"),
        "bmp huge": (bmp(60000, 60000), "60000 x 60000"),
        "bmp cut": (bmp(100, 100), BROKEN),
        "bmp of odd bits": (bmp(8, 8, 77), "is"),
        "too long": (good + b"\0" * (1 << 20), "bytes that are allowed"),
        "video": (video(), NOT_ONE),
    }
    for name, (data, said) in images.items():
        yield name, "image_url", data_url(data), said
    whole = video(64)
    videos: dict[str, tuple[bytes, str]] = {
        "image": (good, "is not a video that can be read"),
        "playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n", "is not a video that can be read"),
        "concat": (b"ffconcat version 1.0\nfile /etc/passwd\n", "is not a video that can be read"),
        "sound": (sound(), "is not a video that can be read"),
        "cut": (whole[: len(whole) // 3], "is"),
        "spoiled": (whole[:48] + bytes(len(whole) - 48), "is"),
        "large": (video(4, 2048, 1024), "frames of 2048 x 1024 pixels"),
        "webm cut": (video(8, codec="libvpx", kind="webm")[:200], "is"),
    }
    for name, (data, said) in videos.items():
        yield f"video: {name}", "video_url", data_url(data, "video/mp4"), said


def urls(port: int) -> Iterator[tuple[str, str]]:
    """(URL, what is said of it), where all hosts in it are allowed, and `port` is one of this machine."""
    for scheme in ("file:///etc/passwd", "ftp://example.org/a.png", "gopher://127.0.0.1:70/_", "javascript:alert(1)"):
        yield scheme, "has the scheme"
    yield "/etc/passwd", "has the scheme"
    yield "data:image/png;base64", "without a comma"
    yield "data:image/png;base64,@@@@", "is not valid base64"
    yield "data:image/png;base64,AAA", "is not valid base64"
    yield "data:,hello", NOT_ONE
    yield f"http://elsewhere.example:{port}/a.png", "is not one of those that are allowed"
    yield f"http://allowed.example:{port}@127.0.0.1/a.png", "is not"
    yield f"http://user@127.0.0.1:{port}/a.png", "has a user name"
    yield "http://127.0.0.1:99999/a.png", "is not a URL"
    yield "http://[::1/a.png", "is not a URL"
    yield f"http://127.0.0.1:{port}/a b\r\nHost: x", "has characters"
    for host in PRIVATE:
        yield f"http://{host}:{port}/a.png", "is private"


PRIVATE = (
    *("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0.0.0.0", "10.0.0.1"),
    *("192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "[::1]", "[::ffff:127.0.0.1]"),
    *("[fe80::1]", "[fd00::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[::]"),
)
