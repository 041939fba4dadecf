use std::fmt;
use std::io::Write;
use std::process::ExitCode;

use wirepath_pipeline::RuntimeError;
use wirepath_pmd::port::PortError;
use wirepath_pmd::settings::ConfigError;

/// Why a program ends without success: which exit code, and one message that says what to do.
#[derive(Debug)]
pub enum Failure {
    /// Bad usage or configuration, nothing was started: exit code 2.
    Usage(String),
    /// It did not work: exit code 1.
    Failed(String),
    /// The answer is "no", and was printed already: exit code 1.
    Silent,
    /// A program that should be run for the user was not: with the exit code that a shell would give.
    NotRun {
        /// 126: it cannot be run; 127: it is not there.
        code: u8,
        /// What to say.
        message: String,
    },
    /// A program that was run for the user ended with this exit code, and has said why.
    Ended(u8),
}

impl Failure {
    /// Bad usage or configuration.
    pub fn usage(message: impl fmt::Display) -> Self {
        Self::Usage(message.to_string())
    }

    /// A failure at work.
    pub fn failed(message: impl fmt::Display) -> Self {
        Self::Failed(message.to_string())
    }

    /// The exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code())
    }

    fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failed(_) | Self::Silent => 1,
            Self::NotRun { code, .. } | Self::Ended(code) => *code,
        }
    }

    pub(super) fn report(&self) {
        if let Self::Usage(message) | Self::Failed(message) | Self::NotRun { message, .. } = self {
            // Nobody is left to hear that standard error is closed.
            let _ = writeln!(std::io::stderr(), "error: {}", super::output::shown(message));
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(message) | Self::Failed(message) | Self::NotRun { message, .. } => f.write_str(message),
            Self::Silent => f.write_str("failed"),
            Self::Ended(code) => write!(f, "ended with exit code {code}"),
        }
    }
}

impl std::error::Error for Failure {}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::usage(error)
    }
}

impl From<PortError> for Failure {
    fn from(error: PortError) -> Self {
        Self::failed(error)
    }
}

impl From<RuntimeError> for Failure {
    fn from(error: RuntimeError) -> Self {
        if error.is_configuration() { Self::usage(error) } else { Self::failed(error) }
    }
}

impl From<wirepath_pmd::packet::PoolError> for Failure {
    fn from(error: wirepath_pmd::packet::PoolError) -> Self {
        Self::failed(error)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::failed(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_errors_are_usage_and_the_rest_is_not() {
        let error = wirepath_pmd::settings::Source::new("c.toml", "a = = 1").parse().unwrap_err();
        assert_eq!(Failure::from(error).code(), 2);
        assert_eq!(Failure::from(PortError::QueuesMissing { port: "p".into() }).code(), 1);
        assert_eq!(Failure::from(std::io::Error::other("x")).code(), 1);
        assert_eq!(Failure::from(RuntimeError::NoCore { core: 99, allowed: vec![0] }).code(), 2);
        assert_eq!(Failure::Silent.code(), 1);
    }
}
