//! Views and builders of packet headers.
