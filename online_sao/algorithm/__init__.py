"""The paper's equations, pure torch. See README.md beside this file."""
