//! Check of the processor. The programs are built for x86-64-v3, those of packages for x86-64-v2. On an older
//! processor they would end with an "illegal instruction" signal, which does not explain the problem. The feature
//! flags come from the kernel, which also knows whether the registers are enabled. The detection in the standard
//! library is useless here, because it assumes all features that the build enables.

use super::Failure;

/// Features that x86-64-v2 adds to the baseline (System V psABI, table 3.1), with their names in `/proc/cpuinfo`.
const V2: &[&str] = &["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"];
/// Features that x86-64-v3 adds to x86-64-v2. The flag `abm` includes LZCNT.
const V3: &[&str] = &["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"];

/// Features that this build needs and the first processor lacks. Empty if the kernel does not report flags, and on
/// other architectures.
pub fn missing_cpu_features() -> Vec<&'static str> {
    if cfg!(not(target_arch = "x86_64")) {
        return Vec::new();
    }
    std::fs::read_to_string("/proc/cpuinfo").map_or_else(|_| Vec::new(), |text| missing_from(&text, needed()))
}

/// Levels above the baseline that this build needs.
fn needed() -> &'static [&'static [&'static str]] {
    if cfg!(target_feature = "avx2") {
        &[V2, V3]
    } else if cfg!(target_feature = "sse4.2") {
        &[V2]
    } else {
        &[]
    }
}

fn missing_from(cpuinfo: &str, needed: &[&[&'static str]]) -> Vec<&'static str> {
    let Some(flags) = cpuinfo.lines().find(|line| line.starts_with("flags")) else { return Vec::new() };
    let has = |feature: &&'static str| !flags.split_ascii_whitespace().any(|flag| flag == *feature);
    needed.iter().copied().flatten().copied().filter(has).collect()
}

pub(super) fn check() -> Result<(), Failure> {
    match missing_cpu_features() {
        missing if missing.is_empty() => Ok(()),
        missing => Err(Failure::Failed(format!(
            "this program was built for x86-64-v{}, but the processor has no {}; build it here with \
             RUSTFLAGS=\"-C target-cpu=native\" cargo build --release",
            needed().len() + 1,
            missing.join(", ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_whole_words() {
        let all = [V2, V3].concat().join(" ");
        assert!(missing_from(&format!("processor : 0\nflags\t\t: fpu {all}\n"), &[V2, V3]).is_empty());
        let older = format!("flags : {}\n", all.replace("avx2", "avx2x").replace("fma", ""));
        assert_eq!(missing_from(&older, &[V2, V3]), ["avx2", "fma"]);
        assert!(missing_from(&older, &[V2]).is_empty());
        assert_eq!(missing_from("flags : fpu\n", &[V2]), V2);
        assert!(missing_from("no such line", &[V2]).is_empty(), "nothing known, nothing claimed");
    }
}
