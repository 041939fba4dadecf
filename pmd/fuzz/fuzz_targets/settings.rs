//! Configuration files: the reader and the settings of the drivers never panic, and each error is one line with a
//! position.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_pmd::drivers;
use wirepath_settings::{ConfigError, Settings, Source};

fn read(settings: &Settings<'_>) -> Result<(), ConfigError> {
    for port in settings.tables("port")? {
        let port = drivers::plan(port)?;
        let _ = (format!("{port:?}"), port.name_span.error("x"));
    }
    if let Some(workers) = settings.table("workers")? {
        workers.list::<u16>("cores", "numbers")?;
        workers.choice("idle", &[("busy", 0), ("adaptive", 1)])?;
        workers.integer::<u32>("n", 0..=1 << 40)?;
        workers.get::<f64>("rate")?;
        workers.finish()?;
    }
    Ok(())
}

fuzz_target!(|text: &str| {
    let source = Source::new("fuzz.toml", text);
    let result = match source.parse() {
        Ok(document) => {
            let settings = document.settings();
            read(&settings).and_then(|()| settings.finish())
        }
        Err(error) => Err(error),
    };
    if let Err(error) = result {
        let (line, column) = error.position.expect("the text is known, so the error has a position");
        assert!(line >= 1 && line <= text.lines().count() + 1 && column >= 1, "{line}:{column} of {text:?}");
        for one in error.split().0 {
            assert!(!one.to_string().contains('\n'), "{one}");
        }
    }
});
