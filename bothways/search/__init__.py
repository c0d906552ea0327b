"""step function -> hypotheses; imports no model"""
