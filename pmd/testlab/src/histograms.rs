//! Histogram logs of HdrHistogram, as its own tools read them.

use hdrhistogram::Histogram;
use hdrhistogram::serialization::Deserializer;
use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

/// Reads the tagged histograms of a log.
///
/// # Panics
/// If the log is malformed, or a histogram has no tag.
pub fn read_histogram_log(log: &[u8]) -> Vec<(String, Histogram<u64>)> {
    let mut read = Vec::new();
    for entry in IntervalLogIterator::new(log) {
        if let LogEntry::Interval(interval) = entry.expect("an entry") {
            let bytes = decode_base64(interval.encoded_histogram());
            let histogram = Deserializer::new().deserialize(&mut bytes.as_slice()).expect("a histogram");
            read.push((interval.tag().expect("a tag").as_str().to_owned(), histogram));
        }
    }
    read
}

/// Decodes base64 (RFC 4648 section 4).
fn decode_base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits: Vec<u32> =
        text.bytes().filter_map(|c| DIGITS.iter().position(|digit| *digit == c)).map(|digit| digit as u32).collect();
    let bytes = digits.chunks(4).flat_map(|four| {
        let word = four.iter().fold(0, |word, digit| word << 6 | digit) << (6 * (4 - four.len()));
        word.to_be_bytes()[1..four.len()].to_vec()
    });
    bytes.collect()
}
