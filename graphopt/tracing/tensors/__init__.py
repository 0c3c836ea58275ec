"""Tensors as Python objects in a traced step: attributes, storages, histories and classes."""
