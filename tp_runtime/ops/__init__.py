"""Operations on tensors, each with a plain torch form that defines it."""
