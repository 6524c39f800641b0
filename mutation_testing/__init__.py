"""Mutation testing: changes one expression or statement of the code at a time, and runs the tests that cover it."""
