//! `wirepath doctor`: finds problems of the machine and names the command that fixes each.

mod checks;
mod collect;
mod evpn;
mod facts;

use std::path::{Path, PathBuf};

pub use checks::run_checks;
pub use facts::Facts;
use serde::Serialize;

use wirepath::cli::{Failure, print, print_json};

/// Finds problems and names the command that fixes each
///
/// OK: no problem. WARN: works, but slower or with fewer drivers. FAIL: ports on network interfaces will
/// not work. The exit code is 1 if there is a FAIL, otherwise 0. The line after `>` is the command that
/// fixes the problem. With --json: an object with `ok` and `findings` (check, level, found, remedy).
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Instead, write an archive for a bug report: versions, findings, devices with capabilities, counters. It
    /// holds no passwords, keys or environment
    #[arg(long, value_name = "FILE.tar.gz")]
    collect: Option<PathBuf>,

    /// A file to add to the archive, such as a log or a configuration
    #[arg(long, value_name = "FILE", requires = "collect")]
    add: Vec<PathBuf>,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Level {
    /// No problem.
    Ok,
    /// Works, but slower or with fewer drivers.
    Warn,
    /// Ports on network interfaces will not work.
    Fail,
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Name of the check, in a word or two.
    pub check: &'static str,
    /// Severity.
    pub level: Level,
    /// Observation and its consequence.
    pub found: String,
    /// Command that fixes the problem or improves the configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    ok: bool,
    findings: Vec<Finding>,
}

/// Checks this machine and prints the findings. Fails silently if any finding has the level FAIL.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    if let Some(path) = &options.collect {
        return collect::collect(path, &options.add);
    }
    let findings = run_checks(&Facts::read(Path::new("/")));
    let ok = findings.iter().all(|finding| finding.level < Level::Fail);
    if json {
        print_json(&Report { ok, findings })?;
    } else {
        print(text(&findings))?;
    }
    if ok { Ok(()) } else { Err(Failure::Silent) }
}

fn text(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.check.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Finding { check, level, found, remedy } in findings {
        let level = match level {
            Level::Ok => "OK  ",
            Level::Warn => "WARN",
            Level::Fail => "FAIL",
        };
        text += &format!("{level}  {check:width$}  {found}\n");
        if let Some(remedy) = remedy {
            text += &format!("      {:width$}  > {remedy}\n", "");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_aligned_and_the_remedy_can_be_copied() {
        let findings = [
            Finding { check: "kernel", level: Level::Ok, found: "6.6".into(), remedy: None },
            Finding {
                check: "huge pages",
                level: Level::Warn,
                found: "none".into(),
                remedy: Some("sysctl x=1".into()),
            },
        ];
        assert_eq!(text(&findings), "OK    kernel      6.6\nWARN  huge pages  none\n                  > sysctl x=1\n");
        let json = serde_json::to_string(&findings[1]).unwrap();
        assert_eq!(json, r#"{"check":"huge pages","level":"WARN","found":"none","remedy":"sysctl x=1"}"#);
    }
}
