"""Training that exchanges parameters now and then: LocalSGD and its kin."""
