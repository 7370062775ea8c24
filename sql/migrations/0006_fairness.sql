-- How long a model without a place waits before busy ones are asked to leave for it.
set local role llmgw_owner;

insert into llmgw_core.setting (name, value, unit, why) values
    ('fairness', 30, 's', 'a model that waits this long for a place gets it from one that is busy: its running requests finish, new ones wait');
