"""The conformance kit over every driver that ships: ``make conformance``."""
