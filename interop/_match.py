"""x"""


def match(tree, tensors):
    raise NotImplementedError
