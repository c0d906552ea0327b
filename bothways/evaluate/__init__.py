"""text -> scores"""
