//! `wirepath doctor`: what stands in the way, with the command that mends it.

mod checks;
mod facts;

use std::path::Path;

pub use checks::examine;
pub use facts::Facts;
use serde::Serialize;

use crate::cli::{Failure, print, print_json};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, but slower or with fewer drivers.
    Warn,
    /// Real ports will not work.
    Fail,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at, in a word or two.
    pub check: &'static str,
    /// How bad it is.
    pub level: Level,
    /// What was found, and what follows.
    pub found: String,
    /// The command that mends it, or would make a good thing better.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    ok: bool,
    findings: Vec<Finding>,
}

/// Examines this machine and prints what was found. Fails, silently, if any finding does.
pub fn run(json: bool) -> Result<(), Failure> {
    let findings = examine(&Facts::read(Path::new("/")));
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
