//! Manual pages and completions.

use std::collections::BTreeSet;
use std::process::{Command, Output};

use wirepath_testlab::{Requirement, require};

fn wirepath(arguments: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_wirepath")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn every_command_has_a_page_without_warnings() {
    let folder = tempfile::tempdir().unwrap();
    wirepath(&["manpages", folder.path().to_str().unwrap()]);
    let pages = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let pages: BTreeSet<String> = pages.collect();
    // Each subcommand that the help names has a page, and there are no others.
    let mut expected: BTreeSet<String> =
        ["l2fwd.1", "tunnel-gateway.1", "wirepath.1", "wirepath-configuration.5", "wirepath-topology.5"]
            .map(str::to_owned)
            .into();
    for (prefix, arguments) in [
        ("wirepath", &["--help"][..]),
        ("wirepath-flow", &["flow", "--help"]),
        ("wirepath-config", &["config", "--help"]),
        ("wirepath-pktgen", &["pktgen", "--help"]),
    ] {
        let help = String::from_utf8(wirepath(arguments).stdout).unwrap();
        let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
        let names = commands.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
        let pages = names.filter(|name| !["", "help"].contains(name)).map(|name| format!("{prefix}-{name}.1"));
        expected.extend(pages);
    }
    assert_eq!(pages, expected);
    assert!(pages.contains("wirepath-flow-check.1") && pages.contains("wirepath-show.1"), "{pages:?}");
    require!(Requirement::Program("man"), Requirement::Program("groff"));
    for page in &pages {
        let path = folder.path().join(page);
        let output = Command::new("man").args(["--warnings", "-l"]).arg(&path).env("MANWIDTH", "100").output().unwrap();
        let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && errors.is_empty(), "{page}: {errors}");
        let words = match page.as_str() {
            "wirepath-configuration.5" => ["[workers]", "sleep_below: integer from 1"],
            "wirepath-topology.5" => ["[[fault]]", "mac: a unicast address"],
            _ => ["SYNOPSIS", "--log-level"],
        };
        assert!(words.iter().all(|word| text.contains(word)), "{page}: {text}");
    }
    // Examples keep their lines.
    let page = std::fs::read_to_string(folder.path().join("l2fwd.1")).unwrap();
    assert!(page.contains("\n  [[port]]\n  name = \"left\""), "{page}");
}

#[test]
fn completions_are_scripts_of_their_shells() {
    for program in ["wirepath", "l2fwd", "tunnel-gateway"] {
        for (shell, word) in [("bash", "complete -F"), ("zsh", "#compdef"), ("fish", "complete -c")] {
            let script = wirepath(&["completions", shell, program]).stdout;
            let text = String::from_utf8(script.clone()).unwrap();
            assert!(text.contains(word) && text.contains(program) && text.contains("log-format"), "{shell}: {text}");
            let installed = Command::new(shell).arg("--version").output().is_ok();
            if installed {
                let folder = tempfile::tempdir().unwrap();
                let path = folder.path().join("script");
                std::fs::write(&path, script).unwrap();
                let output = Command::new(shell).arg("-n").arg(&path).output().unwrap();
                assert!(output.status.success() && output.stderr.is_empty(), "{shell} {program}: {output:?}");
            }
        }
    }
}
