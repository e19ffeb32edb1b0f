"""Pictures of shapes, and what can be asked of them: all that the demo model that sees is trained on."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
COLOURS: dict[str, tuple[Colour, ...]] = {  # each name is all that lies between two of these
    "red": ((255, 0, 0), (200, 30, 40)),
    "green": ((0, 128, 0), (0, 220, 0), (60, 160, 60)),
    "blue": ((0, 0, 255), (40, 80, 200)),
    "yellow": ((255, 255, 0), (245, 210, 50)),
    "orange": ((255, 165, 0), (240, 120, 20)),
    "purple": ((128, 0, 128), (150, 60, 200)),
    "black": ((0, 0, 0), (35, 35, 35)),
    "white": ((255, 255, 255), (238, 238, 238)),
    "grey": ((128, 128, 128), (175, 175, 175)),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
SIDES = {"square": 4, "triangle": 3}
NUMBERS = ("No", "One", "Two", "Three")
# width to height; rare ones are rare in pictures, too
ASPECTS = ((1, 1), (1, 1), (1, 1), (1, 1), (4, 3), (3, 2), (3, 4), (2, 3), (16, 9))
UNSEEN = "I see no picture."
GREETING = "Send me a picture, and ask for its shapes and colours."
GREETINGS = ("Hello", "Hello!", "Hi", "Who are you?", "What can you do?", "What is this about?", "Help", "Good morning")


@dataclass(frozen=True)
class Thing:
    """One shape; where its middle is, of the width and the height, and how far it reaches, of the shorter side."""

    shape: str
    colour: str
    x: float = 0.0
    y: float = 0.0
    radius: float = 0.0

    @property
    def named(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def one(self) -> str:
        return f"{'an' if self.colour[0] in 'aeiou' else 'a'} {self.named}"


@dataclass(frozen=True)
class Picture:
    """What is drawn, from left to right, on a background of a colour."""

    image: Image.Image
    things: tuple[Thing, ...]
    background: str

    def at(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Which of `things` is at these places, given in shares of width and height; -1 is none."""
        width, height = self.image.size
        found = np.full(x.shape, -1)
        for number, thing in enumerate(self.things):
            apart = np.hypot((x - thing.x) * width, (y - thing.y) * height)
            found[apart < thing.radius * min(width, height)] = number
        return found

    def png(self) -> bytes:
        file = io.BytesIO()
        self.image.save(file, "PNG")
        return file.getvalue()


def draw(rng: random.Random, side: int | None = None) -> Picture:
    """A picture of one to three shapes, no two of which have a shape or a colour in common.

    Args:
        side: the square root of its pixels; None is any.
    """
    area, (width, height) = side or rng.choice((64, 96, 128, 200)), rng.choice(ASPECTS)
    unit = area / math.sqrt(width * height)
    width, height = round(width * unit), round(height * unit)
    background = "white" if rng.random() < 0.4 else rng.choice([*COLOURS])
    image = Image.new("RGB", (width, height), _shade(rng, background))
    pen = ImageDraw.Draw(image)
    count = rng.choices((1, 2, 3), (4, 4, 2))[0]
    colours = rng.sample([name for name in COLOURS if name not in (background, "grey")], count)
    things = []
    for place, shape, colour in zip(
        _places(rng, width, height, count), rng.sample(SHAPES, count), colours, strict=True
    ):
        _draw_shape(rng, pen, shape, _shade(rng, colour), *place)
        x, y, radius = place
        things.append(Thing(shape, colour, x / width, y / height, radius / min(width, height)))
    if rng.random() < 0.2:
        image = _as_jpeg(rng, image)
    return Picture(image, tuple(sorted(things, key=lambda thing: thing.x)), background)


def _shade(rng: random.Random, name: str) -> Colour:
    first, second, share = rng.choice(COLOURS[name]), rng.choice(COLOURS[name]), rng.random()
    mixed = (a + (b - a) * share + rng.uniform(-6, 6) for a, b in zip(first, second, strict=True))
    red, green, blue = (min(255, max(0, round(value))) for value in mixed)
    return red, green, blue


def _places(rng: random.Random, width: int, height: int, count: int) -> list[tuple[float, float, float]]:
    """Middles and radii: apart from each other, and from left to right so that it is clear which is where."""
    short = min(width, height)
    while True:
        places: list[tuple[float, float, float]] = []
        least, most = ((0.2, 0.44), (0.17, 0.28), (0.16, 0.22))[count - 1]
        for _ in range(count):
            radius = rng.uniform(least, most) * short
            places.append((rng.uniform(radius, width - radius), rng.uniform(radius, height - radius), radius))
        pairs = [(a, b) for i, a in enumerate(places) for b in places[:i]]
        if all(math.dist(a[:2], b[:2]) > 1.1 * (a[2] + b[2]) and abs(a[0] - b[0]) > 0.12 * width for a, b in pairs):
            return places


def _draw_shape(
    rng: random.Random, pen: ImageDraw.ImageDraw, shape: str, colour: Colour, x: float, y: float, radius: float
) -> None:
    def corners(radii: list[float], turned: float) -> list[tuple[float, float]]:
        """Around the middle, the first one at the top unless it is turned."""
        angles = [2 * math.pi * i / len(radii) + turned - math.pi / 2 for i in range(len(radii))]
        return [(x + r * math.cos(a), y + r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]

    little = rng.gauss(0, 0.08)
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif shape == "cross":
        arm = radius * rng.uniform(0.22, 0.36)
        pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
        pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)
    elif shape == "star":
        pen.polygon(corners([radius, radius * rng.uniform(0.36, 0.46)] * 5, little), fill=colour)
    else:
        sides = SIDES[shape]
        upright = math.pi / 4 if sides == 4 else rng.choice((0.0, 0.0, math.pi))
        pen.polygon(corners([radius] * sides, upright + little), fill=colour)


def _as_jpeg(rng: random.Random, image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=rng.randint(60, 95))
    return Image.open(file).convert("RGB")


def _listed(names: list[str]) -> str:
    text = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{text[0].upper()}{text[1:]}."


Asked = tuple[str, str]


def _describe(rng: random.Random, picture: Picture) -> Asked:
    image = rng.choice(("picture", "image"))
    asked = (
        f"What is in the {image}?", f"What is in this {image}?", "What do you see?", f"Describe the {image}.",
        f"Describe this {image}.", f"What does the {image} show?", f"What is shown in this {image}?", "What is this?",
    )  # fmt: skip
    return rng.choice(asked), _listed([thing.one for thing in picture.things])


def _colour(rng: random.Random, picture: Picture) -> Asked:
    colour, shape = rng.choice(("colour", "color")), rng.choice(SHAPES)
    found = next((thing for thing in picture.things if thing.shape == shape), None)
    if found is None and rng.random() < 0.85:
        found = rng.choice(picture.things)
    if found is None:
        return f"What {colour} is the {shape}?", f"There is no {shape}."
    asked = [f"What {colour} is the {found.shape}?", f"Which {colour} is the {found.shape}?"]
    if len(picture.things) == 1:
        asked += [f"What {colour} is it?", f"What {colour} is the shape?"]
    return rng.choice(asked), f"{found.colour.capitalize()}."


def _shape(rng: random.Random, picture: Picture) -> Asked:
    found = rng.choice(picture.things)
    if len(picture.things) == 1 and rng.random() < 0.5:
        return rng.choice(("What shape is it?", "Which shape is it?", "What shape is this?")), f"A {found.shape}."
    asked = (f"What is {found.colour}?", f"Which shape is {found.colour}?", f"What shape is the {found.colour} one?")
    return rng.choice(asked), f"The {found.shape}."


def _count(rng: random.Random, picture: Picture) -> Asked:
    asked = ("How many shapes are there?", "How many shapes do you see?", "How many shapes are in the picture?")
    return rng.choice(asked), f"{NUMBERS[len(picture.things)]}."


def _whether(rng: random.Random, picture: Picture) -> Asked:
    colours = [name for name in COLOURS if name not in ("grey", picture.background)]
    thing, colour, shape = rng.choice(picture.things), rng.choice(colours), rng.choice(SHAPES)
    if rng.random() < 0.5:
        colour, shape = thing.colour, thing.shape
    kind = rng.randrange(4)
    if kind == 0:
        there = any((each.colour, each.shape) == (colour, shape) for each in picture.things)
        asked = f"Is there {Thing(shape, colour).one}?"
    elif kind == 1:
        there, asked = any(each.shape == shape for each in picture.things), f"Is there a {shape}?"
    elif kind == 2:
        there, asked = any(each.colour == colour for each in picture.things), f"Is anything {colour}?"
    else:
        there, asked = thing.colour == colour, f"Is the {thing.shape} {colour}?"
    return asked, "Yes." if there else "No."


def _background(rng: random.Random, picture: Picture) -> Asked:
    return f"What {rng.choice(('colour', 'color'))} is the background?", f"{picture.background.capitalize()}."


def _side(rng: random.Random, picture: Picture) -> Asked:
    if len(picture.things) == 1:
        return _describe(rng, picture)
    side = rng.randrange(2)
    return f"What is on the {('left', 'right')[side]}?", _listed([picture.things[-side].one])


QUESTIONS: dict[str, Callable[[random.Random, Picture], Asked]] = {
    "describe": _describe,
    "colour": _colour,
    "shape": _shape,
    "count": _count,
    "whether": _whether,
    "background": _background,
    "side": _side,
}

HOW_OFTEN = (3, 5, 1, 1, 1, 1, 3)  # what takes longest to learn is asked most


def ask(rng: random.Random, picture: Picture | None, kind: str | None = None) -> Asked:
    """A question, and what is true.

    Args:
        picture: None asks without one.
        kind: of `QUESTIONS`; None is any.
    """
    if picture is None:
        if rng.random() < 0.3:
            return rng.choice(GREETINGS), GREETING
        return QUESTIONS[rng.choice([*QUESTIONS])](rng, draw(rng))[0], UNSEEN
    question, answer = QUESTIONS[kind or rng.choices([*QUESTIONS], HOW_OFTEN)[0]](rng, picture)
    if kind is None and rng.random() < 0.1:
        question = question.lower().rstrip("?.")
    return question, answer
