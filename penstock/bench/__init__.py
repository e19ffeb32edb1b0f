"""Measuring a server or an engine as its users see it. In doubt a number errs against what is measured."""
