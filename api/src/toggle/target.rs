use aura_kit::Code;
use aura_pgsource::admin::{Admin, TableInfo};

use crate::{
    access::TableService,
    error::{ApiError, Result},
};

/// What whoever changes a table's state may get besides what the source answers.
pub(crate) const CHANGES_TABLE: &[Code] = &[
    Code::TableNotFound,
    Code::NotTableOwner,
    Code::ReplicaIdentityNotFull,
    Code::RowSecurityRequired,
    Code::ConcurrentChange,
    Code::LockTimeout,
    Code::SystemSchemaNotSupported,
    Code::ViewNotSupported,
    Code::ForeignTableNotSupported,
    Code::TemporaryTableNotSupported,
    Code::UnloggedTableNotSupported,
    Code::RelationNotSupported,
];

/// 404 if there is no such table, 422 if it can't have a change stream (R-REG-4).
pub(crate) fn checked(found: Option<TableInfo>, service: &TableService) -> Result<TableInfo> {
    let info = found.ok_or_else(|| not_found(service))?;
    check(&info)?;
    Ok(info)
}

/// The relation of that name, whatever it is.
pub(crate) async fn find(admin: &Admin, service: &TableService) -> Result<Option<TableInfo>> {
    Ok(admin.table(service.schema(), service.table()).await?)
}

/// Names the physical schema: who administers the project may know it, and looks in the wrong one without.
pub(crate) fn not_found(service: &TableService) -> ApiError {
    let schema = service.schema();
    let detail = format!("The schema {schema} has no table of that name; names are case-sensitive.");
    ApiError::new(Code::TableNotFound, detail)
}

fn check(info: &TableInfo) -> Result<()> {
    let (code, detail) = match (info.kind, info.persistence) {
        _ if info.is_system => (Code::SystemSchemaNotSupported, "It belongs to the server or to us."),
        ('v' | 'm', _) => (Code::ViewNotSupported, "Enable the tables that the view reads."),
        ('f', _) => (Code::ForeignTableNotSupported, "Its changes are in another server's log."),
        ('r' | 'p', 't') => (Code::TemporaryTableNotSupported, "Only its session sees it."),
        ('r' | 'p', 'u') => (Code::UnloggedTableNotSupported, "Make it logged with ALTER TABLE … SET LOGGED."),
        ('r' | 'p', _) => return Ok(()),
        _ => (Code::RelationNotSupported, "Only ordinary tables have one."),
    };
    Err(ApiError::new(code, detail))
}
