//! Lengths of the sent frames.

use std::str::FromStr;

/// Bytes of the frame check sequence, which sizes include.
pub const FCS: usize = 4;
/// Bytes of preamble, start delimiter and inter-frame gap (IEEE 802.3), which layer-1 rates include.
pub const GAP: usize = 20;
/// Shortest and longest frame with its frame check sequence.
pub const LIMITS: (usize, usize) = (64, 9216);

/// Sum of the weights of a list. The lengths of one round are stored.
const MAX_ROUND: usize = 1 << 16;

/// The lengths of the frames of a stream, in bytes with the frame check sequence (RFC 2544 section 9.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// These lengths in turn.
    Round(Vec<u16>),
    /// Random lengths between the first and the last one.
    Range(u16, u16),
}

impl Sizes {
    /// Returns the shortest and the longest length.
    pub fn limits(&self) -> (usize, usize) {
        match self {
            Self::Round(sizes) => {
                let limits = (sizes.iter().min(), sizes.iter().max());
                (limits.0.copied().unwrap_or(0).into(), limits.1.copied().unwrap_or(0).into())
            }
            Self::Range(first, last) => ((*first).into(), (*last).into()),
        }
    }

    /// Returns the mean length.
    pub fn mean(&self) -> f64 {
        match self {
            Self::Round(sizes) => sizes.iter().map(|size| f64::from(*size)).sum::<f64>() / sizes.len().max(1) as f64,
            Self::Range(first, last) => f64::midpoint((*first).into(), (*last).into()),
        }
    }

    /// Returns the length of packet `n`.
    #[inline]
    pub(super) fn of(&self, n: u64, random: &mut fastrand::Rng) -> usize {
        match self {
            Self::Round(sizes) if sizes.len() == 1 => sizes[0].into(),
            Self::Round(sizes) => sizes[(n % sizes.len() as u64) as usize].into(),
            Self::Range(first, last) => random.u16(*first..=*last).into(),
        }
    }
}

fn size(text: &str) -> Result<u16, String> {
    let (least, most) = LIMITS;
    match text.parse() {
        Ok(size) if (least..=most).contains(&usize::from(size)) => Ok(size),
        _ => Err(format!(
            "found \"{text}\", expected a frame length from {least} to {most} bytes with the frame check sequence"
        )),
    }
}

/// Spreads the lengths over one round according to their weights.
fn round(weighted: &[(u16, usize)]) -> Vec<u16> {
    let total: usize = weighted.iter().map(|(_, weight)| weight).sum();
    // Each length has a credit that grows by its weight; the one with most credit is next.
    let mut credits = vec![0i64; weighted.len()];
    let mut sizes = Vec::with_capacity(total);
    for _ in 0..total {
        credits.iter_mut().zip(weighted).for_each(|(credit, (_, weight))| *credit += *weight as i64);
        let next = (0..credits.len()).rev().max_by_key(|i| credits[*i]).unwrap_or(0);
        credits[next] -= total as i64;
        sizes.push(weighted[next].0);
    }
    sizes
}

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.eq_ignore_ascii_case("imix") {
            return Ok(Self::Round(round(&[(64, 7), (570, 4), (1518, 1)])));
        }
        if let Some((first, last)) = text.split_once('-') {
            let (first, last) = (size(first)?, size(last)?);
            return if first <= last {
                Ok(Self::Range(first, last))
            } else {
                Err(format!("the range {first}-{last} is empty; write {last}-{first}"))
            };
        }
        let mut weighted = Vec::new();
        for part in text.split(',') {
            let (bytes, weight) = part.split_once(':').unwrap_or((part, "1"));
            let weight = weight.parse().ok().filter(|weight| (1..=1000).contains(weight));
            weighted.push((size(bytes)?, weight.ok_or_else(|| format!("{part}: expected a weight from 1 to 1000"))?));
        }
        if weighted.iter().map(|(_, weight)| weight).sum::<usize>() > MAX_ROUND {
            return Err(format!("the weights of all sizes may have a sum of {MAX_ROUND}"));
        }
        Ok(Self::Round(round(&weighted)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_of_sizes() {
        let read = |text: &str| text.parse::<Sizes>();
        assert_eq!(read("64"), Ok(Sizes::Round(vec![64])));
        assert_eq!(read("64,128"), Ok(Sizes::Round(vec![64, 128])));
        assert_eq!(read("64-1518"), Ok(Sizes::Range(64, 1518)));
        let Ok(Sizes::Round(imix)) = read("imix") else { panic!() };
        let count = |size| imix.iter().filter(|it| **it == size).count();
        assert_eq!((imix.len(), count(64), count(570), count(1518)), (12, 7, 4, 1));
        assert!(imix.windows(3).any(|three| three == [64, 570, 64]), "they alternate: {imix:?}");
        for (text, error) in [
            ("63", "from 64 to 9216"),
            ("9217", "from 64 to 9216"),
            ("1518-64", "write 64-1518"),
            ("64:0", "from 1 to 1000"),
            ("64,", "found \"\""),
            ("imx", "found \"imx\""),
        ] {
            assert!(read(text).unwrap_err().contains(error), "{text}");
        }
    }

    #[test]
    fn means_are_those_of_the_sizes() {
        let mean = |text: &str| text.parse::<Sizes>().unwrap().mean();
        assert_eq!((mean("64"), mean("64-128"), mean("64:3,1024:1")), (64.0, 96.0, 304.0));
        assert_eq!("64:3,1024".parse::<Sizes>().unwrap().limits(), (64, 1024));
    }
}
