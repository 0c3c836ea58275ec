"""Tensors as objects of the program: their attributes, storages, histories and classes."""
