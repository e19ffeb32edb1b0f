"""Of the whole package."""

VERSION = "0.1.0"
