//! The levels of a program's log. A process has one log, so the test is alone in its binary.

use tracing::level_filters::LevelFilter;
use tracing::{Level, enabled};
use wirepath::cli::Common;
use wirepath::cli::log::{self, LogSettings};

#[test]
fn levels_change_at_run_time() {
    assert!(log::set(LevelFilter::DEBUG, None).is_err(), "the log was not started");
    Common { quiet: true, ..Common::default() }.configure_log(&LogSettings::default());
    let states = || {
        [
            enabled!(target: "wirepath_pmd::port", Level::INFO),
            enabled!(target: "wirepath_pmd::port", Level::DEBUG),
            enabled!(target: "wirepath_flow", Level::INFO),
        ]
    };
    assert_eq!((states(), log::levels().as_str()), ([false; 3], "error"));
    log::set(LevelFilter::DEBUG, Some("wirepath_pmd")).unwrap();
    assert_eq!((states(), log::levels().as_str()), ([true, true, false], "error,wirepath_pmd=debug"));
    log::set(LevelFilter::INFO, None).unwrap();
    log::set(LevelFilter::WARN, Some("wirepath_pmd::port")).unwrap();
    assert_eq!(states(), [false, false, true]);
    assert!(log::set(LevelFilter::INFO, Some("no module")).is_err());
    log::set(LevelFilter::ERROR, None).unwrap();
    assert_eq!(log::levels(), "error,wirepath_pmd=debug,wirepath_pmd::port=warn");
    log::reset(Some("wirepath_pmd::port")).unwrap();
    assert_eq!((states(), log::levels().as_str()), ([true, true, false], "error,wirepath_pmd=debug"));
    assert!(log::reset(Some("wirepath_pmd::port")).unwrap_err().contains("no level of its own"));
    log::reset(None).unwrap();
    assert_eq!((states(), log::levels().as_str()), ([false; 3], "error"));

    let levels = "warn,wirepath_pmd=info".parse().unwrap();
    Common::default().configure_log(&LogSettings { levels: Some(levels), ..LogSettings::default() });
    log::set(LevelFilter::DEBUG, Some("wirepath_pmd")).unwrap();
    log::reset(Some("wirepath_pmd")).unwrap();
    assert_eq!((states(), log::levels().as_str()), ([true, false, false], "warn,wirepath_pmd=info"));
}
