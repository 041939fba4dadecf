//! Tests of the parser, the builders and segmentation.

mod build;
mod edit;
mod frames;
mod parse;
mod parse_errors;
mod segment;
mod stack_tests;
mod stacks;
