"""Configurations that ship with the package: `dg-lightning fit --config digits/dynamicgate`."""
